# An image of vLLM as docs/vllm.md wants it: `vllm` on the path, and `pip install 'xpyd[vllm]'`. vLLM's own 6 GB
# are not in it: it looks for them at /opt/vllm-env, where a pod mounts those of the machine. No user is made for
# it, as in vLLM's own images.
ARG BASE
ARG CODE
FROM ${CODE} AS code
RUN --mount=type=secret,id=ca \
    env $([ ! -f /run/secrets/ca ] || echo SSL_CERT_FILE=/run/secrets/ca) \
    uv pip install --quiet --compile-bytecode --python /opt/xpyd/bin/python "$(echo /wheel/*.whl)[vllm]" \
    && cd /opt/xpyd/lib/python3.*/site-packages \
    && for folder in "lib/$(basename "$(dirname "$PWD")")/site-packages" alias; do \
         echo "/opt/vllm-env/$folder"; \
       done > machine.pth \
    && printf '%s\n' '#!/opt/xpyd/bin/python' 'from vllm.entrypoints.cli.main import main' \
       'if __name__ == "__main__":' '    main()' > /opt/xpyd/bin/vllm \
    && chmod 755 /opt/xpyd/bin/vllm

FROM ${BASE}
COPY --from=code /opt/xpyd /opt/xpyd
# vLLM's kernels are linked with it.
COPY libnuma.so.1 /usr/local/lib/
ENV PATH=/opt/xpyd/bin:$PATH LD_LIBRARY_PATH=/usr/local/lib
