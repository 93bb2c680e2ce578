# The image of Reprise. CPU and the embedded models by default:
#   docker build -t reprise .
# For a GPU (any CUDA wheel of torch, and the C compiler that Triton calls when it builds a kernel):
#   docker build --build-arg DEVICE=cuda -t reprise:cuda .
# TORCH_INDEX: an extra index to take torch from, e.g. one with CPU builds; the default Linux wheel carries CUDA.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python3 -m venv /opt/reprise
# Dependencies first: they change less often than the source.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY deploy/docker/requirements.py deploy/docker/requirements.py
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 deploy/docker/requirements.py pyproject.toml > requirements.txt \
    && /opt/reprise/bin/pip install -r requirements.txt -c constraints.txt \
       ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"}
COPY models models
COPY service service
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/reprise/bin/pip install --no-deps .

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
