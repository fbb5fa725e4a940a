# Stands in for the worker's dependencies in the test cluster: an environment without libraries,
# which looks for them at /opt/xpyd-env. There a pod mounts those of the machine. They come last on
# the path, so the image's own xpyd is found before the machine's. The pod of a Job that downloads a
# model mounts its claim alone: test_models.py puts what it needs there.
ARG BASE
FROM ${BASE}
RUN python3 -m venv --without-pip /opt/xpyd \
    && printf '/opt/xpyd-env\n/models/.libraries\n' > "$(echo /opt/xpyd/lib/python3.*/site-packages)/machine.pth"
