"""From a model to a decision: which module runs on which rank."""
