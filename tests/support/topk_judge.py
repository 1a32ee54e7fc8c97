"""What is close enough for top-k logits, in one place for the tests and for runs by hand."""

from typing import Any

# Log-probabilities, absolute. Logits of these models are below 2, and a bfloat16 there is off by 0.004.
LIMIT = {"float32": 0.002, "bfloat16": 0.05}


def complaints(seen: dict[str, Any], k: int) -> list[str]:
    """What is wrong in what topk_worker found; nothing when the logits are right."""
    limit = LIMIT[seen["compute_dtype"]]
    wrong: list[str] = []
    if (shapes := [found["shape"] for found in seen["found"]]) != [[27, k], [135, k]]:
        wrong.append(f"shapes {shapes}")
    for found in seen["found"]:
        if found["repeated"]:
            wrong.append(f"tokens more than once: {found}")
        if not (found["of_ids"] <= limit and found["of_ranks"] <= limit):
            wrong.append(f"beyond {limit}: {found}")
        if seen["compute_dtype"] == "float32" and not found["first_alike"] > 0.9:
            wrong.append(f"another token first: {found}")
    state, logits = seen["refusals"]
    if "changes the state between the final norm and lm_head" not in state:
        wrong.append(f"a changed state was let through: {state!r}")
    if "treats logits in a way of its own" not in logits:
        wrong.append(f"changed logits were let through: {logits!r}")
    return wrong
