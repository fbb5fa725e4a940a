# Stands in for the worker's dependencies in the test cluster: an environment without libraries,
# which looks for them at /opt/xpyd-env. There a pod mounts those of the machine. They come last on
# the path, so the image's own xpyd is found before the machine's.
ARG BASE
FROM ${BASE}
RUN python3 -m venv --without-pip /opt/xpyd \
    && echo /opt/xpyd-env > "$(echo /opt/xpyd/lib/python3.*/site-packages)/machine.pth"
