# The images of `xpyd operator`, `xpyd router` and `xpyd worker`, one target each: `make images`
# (docs/images.md). A build of one target builds only the stages that it needs.
# The base: any image with Python 3.11 or newer with its venv module, and /bin/sh for the build.
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

# What only the build needs, and the empty environment that the stages below install into.
FROM ${BASE} AS tools
ARG UV_VERSION=0.13.8
ARG INDEX=https://pypi.org/simple
# The image's files never change, so bytecode needs no check against its source.
ENV PIP_INDEX_URL=${INDEX} UV_DEFAULT_INDEX=${INDEX} \
    UV_LINK_MODE=copy PYC_INVALIDATION_MODE=UNCHECKED_HASH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=ca \
    python3 -m venv --without-pip /opt/xpyd \
    && python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install --quiet --no-cache-dir --disable-pip-version-check \
       $([ ! -f /run/secrets/ca ] || echo --cert /run/secrets/ca) \
       uv==${UV_VERSION} \
    && env $([ ! -f /run/secrets/ca ] || echo SSL_CERT_FILE=/run/secrets/ca) \
    /opt/tools/bin/uv pip install --quiet --no-cache --python /opt/tools/bin/python \
       --constraints constraints.txt hatchling
ENV PATH=/opt/tools/bin:$PATH

# The dependencies: layers of their own, which a change of the code leaves as they are.
FROM tools AS operator-dependencies
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/uv \
    env $([ ! -f /run/secrets/ca ] || echo SSL_CERT_FILE=/run/secrets/ca) \
    uv pip install --quiet --compile-bytecode --python /opt/xpyd/bin/python \
       --constraints constraints.txt --requirements pyproject.toml --extra operator

# tokenizers asks for huggingface-hub, which it uses only to download; the router reads files that
# engines give it. Without the hub and what that needs the image has 30 MB less.
FROM tools AS router-dependencies
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/uv \
    echo huggingface-hub > /tmp/excluded \
    && env $([ ! -f /run/secrets/ca ] || echo SSL_CERT_FILE=/run/secrets/ca) \
    uv pip install --quiet --compile-bytecode --python /opt/xpyd/bin/python \
       --excludes /tmp/excluded \
       --constraints constraints.txt --requirements pyproject.toml --extra router

# PyPI's torch is the CUDA variant (with CUDA's libraries); TORCH_INDEX names an index that has
# another build of the same version, with other hashes. torch alone is taken from there: such an
# index has old versions of the rest.
FROM tools AS worker-dependencies
ARG TORCH_INDEX=
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/uv \
    if [ -f /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi \
    && if [ -n "${TORCH_INDEX}" ]; then \
         uv pip install --quiet --compile-bytecode --python /opt/xpyd/bin/python --no-deps \
            --no-verify-hashes --constraints constraints.txt --default-index "${TORCH_INDEX}" torch; \
       fi \
    && uv pip install --quiet --compile-bytecode --python /opt/xpyd/bin/python \
       --constraints constraints.txt --requirements pyproject.toml --extra worker --extra otel

# The tree's own files, and the code as a wheel of them: never an editable installation.
FROM tools AS sources
COPY LICENSE README.md hatch_build.py pyproject.toml ./
COPY core core
COPY kv_transfer kv_transfer
COPY operator operator
COPY router router
COPY tools tools
COPY worker_image worker_image

FROM sources AS code
RUN hatchling build --target wheel --directory /wheel \
    && uv pip install --quiet --offline --no-deps --compile-bytecode \
       --python /opt/xpyd/bin/python --prefix /opt/code /wheel/*.whl

# The worker's parts in C and C++ are compiled here, and the compiler stays here; without one
# (COMPILER=) the engine is slower.
FROM tools AS compiler
ARG COMPILER=g++
RUN if [ -n "${COMPILER}" ] && ! command -v c++ > /dev/null; then \
      apt-get update --quiet=2 \
      && apt-get install --quiet=2 --yes --no-install-recommends "${COMPILER}" libc6-dev; \
    fi

FROM compiler AS worker-code
COPY --from=sources /src /src
RUN hatchling build --target wheel --directory /wheel \
    && uv pip install --quiet --offline --no-deps --compile-bytecode \
       --python /opt/xpyd/bin/python --prefix /opt/code /wheel/*.whl

# What every image begins with.
FROM ${BASE} AS base
# Libraries ask for the user's name and home; /tmp is the one place that is written.
RUN echo 'xpyd:x:10001:10001:xpyd:/tmp:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'xpyd:x:10001:' >> /etc/group
ENV PATH=/opt/xpyd/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT ["/opt/xpyd/bin/xpyd"]

FROM base AS operator
USER 10001:10001
EXPOSE 8080
COPY --from=operator-dependencies /opt/xpyd /opt/xpyd
COPY --from=code /opt/code /opt/xpyd
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="xpyd-operator" \
      org.opencontainers.image.description="Operator of xpyd: runs InferenceFleets on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM base AS router
USER 10001:10001
EXPOSE 10001 30001
COPY --from=router-dependencies /opt/xpyd /opt/xpyd
COPY --from=code /opt/code /opt/xpyd
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="xpyd-router" \
      org.opencontainers.image.description="Router of xpyd: OpenAI HTTP in front of prefill and decode engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# Where engines run. On a GPU triton compiles a small C file for each kernel when an engine starts;
# the build of torch for CPUs, from TORCH_INDEX, needs none.
FROM base AS worker-base
ARG COMPILER=g++
ARG TORCH_INDEX=
RUN if [ -n "${COMPILER}" ] && [ -z "${TORCH_INDEX}" ] && ! command -v cc > /dev/null; then \
      apt-get update --quiet=2 \
      && apt-get install --quiet=2 --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi

FROM worker-base AS worker
USER 10001:10001
EXPOSE 20001 21001
COPY --from=worker-dependencies /opt/xpyd /opt/xpyd
# A model to try a fleet with: file://./demo-model, where no volume is mounted at /models.
COPY examples/demo-model /models/demo-model
COPY --from=worker-code /opt/code /opt/xpyd
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="xpyd-worker" \
      org.opencontainers.image.description="Engine of xpyd: prefill and decode instances of a fleet" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
