# The image of a deployment's machines, server and sites alike: make image. Nothing is downloaded while it runs.
FROM python:3.11-slim-bookworm
COPY requirements-deploy.txt /build/
RUN python3 -m venv /opt/fedloom && /opt/fedloom/bin/pip install --no-cache-dir --require-hashes -r /build/requirements-deploy.txt
COPY packages /build/packages
RUN /opt/fedloom/bin/pip install --no-cache-dir --no-deps --no-build-isolation /build/packages/fedloom /build/packages/fedloom-sites && rm -r /build
USER 1000:1000
