"""The features: each file has ``CASES``, and ``before_step``, which sets the feature on models before a step."""
