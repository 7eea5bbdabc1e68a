"""What a configuration of accelerate or DeepSpeed becomes here: keys of ``smp.init``, lines of a script, a command."""
