"""SGLang on a machine without a GPU: its platform, its runtime and its attention."""
