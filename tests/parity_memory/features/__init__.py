"""The features. Each file has

- ``CASES``, without torch;
- ``problem_of(case, problem)``, which may change the problem;
- ``ways(case)``, each of which is in a small choice of cases;
- ``configuration(case)``, which are further configuration keys;
- ``before_step(models, case, step)``, which sets the feature on a rank's models before a step;
- ``failure(case, rows)``, which says from the ranks' rows why it had not its effect, if so;
- where optimizers clip by themselves, ``update(run, name, clip_and_step)``, which steps one and returns the norm;
- for a ``HalfCase``, in place of the first and second function, ``row(case)``, which runs it.
"""
