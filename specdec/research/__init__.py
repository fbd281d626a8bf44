"""Tools of the experimenter: prompt sets, a small real model, benchmarks."""
