# The image of Reprise. CPU and the embedded models by default:
#   docker build -t reprise .
# For a GPU (any CUDA wheel of torch, and the C compiler that Triton calls when it builds a kernel):
#   docker build --build-arg DEVICE=cuda -t reprise:cuda .
# For a CPU uv takes the build of torch without CUDA, from the index that it knows for that; where this cannot be
# reached, pip takes what the default index has, for Linux the build with CUDA. TORCH_INDEX: an extra index instead.
# Python 3.11 is what the whole test suite runs on; 3.12 (the GPU's tests) to 3.14 work as well.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=""
ARG DEVICE=cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python3 -m venv /opt/reprise && python3 -m venv /opt/build
# Dependencies first: they change less often than the source. The locks hold exact versions with hashes; torch and
# CUDA's libraries are held by version alone, and find all else that they need.
COPY requirements.lock requirements-build.lock requirements-torch.lock ./
COPY deploy/install/torch_notice.py deploy/install/torch_notice.py
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/reprise/bin/pip install --no-deps --require-hashes -r requirements.lock \
    && /opt/build/bin/pip install --no-deps --require-hashes -r requirements-build.lock \
    && torch="$(grep '^torch==' requirements-torch.lock)" \
    && if [ -n "${TORCH_INDEX}" ]; then \
         /opt/reprise/bin/pip install --extra-index-url "${TORCH_INDEX}" "${torch}"; \
       elif [ "${DEVICE}" = cpu ] && UV_HTTP_RETRIES=1 /opt/build/bin/uv pip install --no-cache --no-deps \
           --python /opt/reprise/bin/python --torch-backend cpu "${torch}"; then \
         echo "torch without CUDA is installed"; \
       else \
         python3 deploy/install/torch_notice.py --device "${DEVICE}" \
         && /opt/reprise/bin/pip install -c requirements-torch.lock torch; \
       fi
COPY pyproject.toml README.md LICENSE ./
COPY models models
COPY service service
COPY deploy/ray deploy/ray
COPY deploy/install/reprise_server deploy/install/reprise_server
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation -w dist . \
    && /opt/reprise/bin/pip install --no-deps --no-index dist/*.whl

FROM ${BASE}
ARG DEVICE=cpu
# hadolint ignore=DL3008
RUN if [ "${DEVICE}" = cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi \
    && mkdir -p /var/lib/reprise && chown 10001:10001 /var/lib/reprise
COPY --from=build /opt/reprise /opt/reprise
ENV PATH=/opt/reprise/bin:$PATH \
    HOME=/var/lib/reprise \
    HF_HOME=/var/lib/reprise/hub \
    HF_HUB_DISABLE_TELEMETRY=1 \
    DO_NOT_TRACK=1 \
    PYTHONUNBUFFERED=1 \
    REPRISE_DEVICE=${DEVICE} \
    REPRISE_LOG_FORMAT=json
USER 10001:10001
WORKDIR /var/lib/reprise
VOLUME ["/var/lib/reprise"]
EXPOSE 8000
# Ready means loaded and captured: a first start may fetch a model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('REPRISE_PORT', '8000')}/ready\", timeout=4)"]
ENTRYPOINT ["reprise"]
CMD ["serve"]
