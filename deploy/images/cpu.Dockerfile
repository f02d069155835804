# A CPU worker: your handler in app.py, with the packages of requirements.txt.
# Build in the root of the repository, with your files in app/:
#   docker build -f deploy/images/cpu.Dockerfile -t ghcr.io/example/worker:1 .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
COPY deploy ./deploy
COPY docs/runbooks.md ./docs/
# app/requirements.txt is optional: a pattern may match no file. buildah and Podman want another source that exists.
COPY constraints.txt app/requirements.tx[t] ./handler/
RUN python -m venv /opt/windlass \
 && /opt/windlass/bin/pip install --no-cache-dir --constraint constraints.txt . \
 && if [ -s handler/requirements.txt ]; then \
      /opt/windlass/bin/pip install --no-cache-dir --constraint constraints.txt -r handler/requirements.txt; \
    fi

FROM python:3.12-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /home/windlass windlass \
 && install -d -m 700 -o windlass -g windlass /var/lib/windlass
COPY --from=build /opt/windlass /opt/windlass
COPY deploy/images/entrypoint.sh deploy/images/healthcheck.sh /usr/local/bin/
COPY app /app
ENV PATH=/opt/windlass/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /app
USER 10001
# The worker's token, for a container that restarts.
VOLUME /var/lib/windlass
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["healthcheck.sh"]
# docker stop sends SIGTERM, and the worker drains: give it --stop-timeout of at least stop_timeout_s.
ENTRYPOINT ["entrypoint.sh"]
