# What the sbatch files here share; sourced by them, not submitted.
#
#   start_step COMMAND...   run a job step and pass signals on to it; returns its exit code
#   requeue_if_stopped FILE...   ask Slurm to start this job again when a run says it was stopped
#
# torchrun exits 1 whatever its ranks' exit codes are, so that "stopped, start me again" (75) is read
# from the run's own run.json.

# The GPU step; tests put a rank count or a stand-in of extract here.
NPROC=${NPROC:-gpu}
TORCHRUN=${TORCHRUN:-torchrun}
EXTRACT=${EXTRACT:--m extractor extract}

signalled=
step=

pass_on() {
    signalled=yes
    # To the step's tasks, which are torchrun's agents; each passes SIGTERM to its ranks, which drain.
    scancel --signal=TERM "$SLURM_JOB_ID.0" 2>/dev/null || kill -TERM "$step" 2>/dev/null
}

start_step() {
    trap pass_on USR2 TERM
    "$@" &
    step=$!
    local code
    # A signal ends wait, not the step.
    while true; do
        wait "$step"
        code=$?
        kill -0 "$step" 2>/dev/null || return "$code"
    done
}

# The value of --output among the arguments of extract: the last one, with ~ expanded, as extract does.
output_of() {
    local previous= found=
    for argument in "$@"; do
        case $previous:$argument in
            --output:*) found=$argument ;;
            *:--output=*) found=${argument#--output=} ;;
        esac
        previous=$argument
    done
    if [[ -z $found ]]; then
        echo "wanted --output FOLDER among the arguments" >&2
        return 2
    fi
    echo "${found/#\~\//$HOME/}"
}

status_of() {
    sed -n 's/^ "status": "\([a-z]*\)".*/\1/p' "$1" 2>/dev/null | head -n 1
}

requeue_if_stopped() {
    local state
    state=$(status_of "$1")
    # A signal may come before there is a run.json, while Python still imports.
    if [[ $state == stopped || ( -n $signalled && $state != complete && $state != failed ) ]]; then
        echo "stopped with work left: requeueing $SLURM_JOB_ID (start $((${SLURM_RESTART_COUNT:-0} + 1)))"
        # A preemption has queued it already: nothing is left to ask for then.
        scontrol requeue "$SLURM_JOB_ID" 2>/dev/null
    fi
}
