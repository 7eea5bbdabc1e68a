"""The model zoo: many architectures and modules that are hard for a reason, each trained exactly or refused."""
