# A GPU worker: CUDA, your handler in app.py, and the packages of requirements.txt (for example torch).
# Build in the root of the repository, with your files in app/:
#   docker build -f deploy/images/cuda.Dockerfile -t ghcr.io/example/worker:1-cuda .
# Weights: read them from a network volume (/workspace), or bake them in with the argument WEIGHTS, a folder of the
# build context: --build-arg WEIGHTS=weights copies it to /weights. Without it, an empty folder is copied.
# Downloaded weights (HF_HOME) are in the container, which starts without them. The entrypoint moves them to
# /workspace/huggingface where the user of the worker may write there, and the next pods find them. See WORKER_USER.
ARG CUDA=12.8.1-cudnn-runtime-ubuntu24.04
ARG WEIGHTS=deploy/images/no-weights

FROM nvidia/cuda:${CUDA} AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
COPY deploy ./deploy
COPY docs/runbooks.md ./docs/
# app/requirements.txt is optional: a pattern may match no file. buildah and Podman want another source that exists.
COPY constraints.txt app/requirements.tx[t] ./handler/
RUN python3 -m venv /opt/windlass \
 && /opt/windlass/bin/pip install --no-cache-dir --constraint constraints.txt . \
 && if [ -s handler/requirements.txt ]; then \
      /opt/windlass/bin/pip install --no-cache-dir --constraint constraints.txt -r handler/requirements.txt; \
    fi

FROM nvidia/cuda:${CUDA}
ARG WEIGHTS
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --home-dir /home/windlass windlass \
 && install -d -m 700 -o windlass -g windlass /var/lib/windlass \
 && install -d -o windlass -g windlass /home/windlass/huggingface
COPY --from=build /opt/windlass /opt/windlass
# Before the code: a new version of the code does not pull the weights again.
COPY ${WEIGHTS} /weights
COPY deploy/images/entrypoint.sh deploy/images/healthcheck.sh /usr/local/bin/
COPY app /app
ENV PATH=/opt/windlass/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HF_HOME=/home/windlass/huggingface \
    WORKER_NEEDS_GPU=1
WORKDIR /app
# Runpod mounts its network volumes as root, and only root may write there. If your handler writes to the volume, or
# weights are cached on it, build with --build-arg WORKER_USER=root; or run `install -d -o 10001 /workspace/huggingface`
# once as root in a pod with the volume. For another mount point set WORKER_VOLUME in the fleet's env.
ARG WORKER_USER=10001
USER ${WORKER_USER}
VOLUME /var/lib/windlass
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 CMD ["healthcheck.sh"]
# docker stop sends SIGTERM, and the worker drains: give it --stop-timeout of at least stop_timeout_s.
ENTRYPOINT ["entrypoint.sh"]
