# The image of a deployment's machines, server and sites alike: make image. Nothing is downloaded while it runs.
# BASE has no default: make image gives NAME:TAG@sha256:DIGEST, which base-image.txt records.
ARG BASE
FROM ${BASE}
ARG BASE
RUN case "${BASE}" in *@sha256:*) ;; *) echo "the base image has no digest; build with make image" >&2; exit 1 ;; esac
LABEL org.opencontainers.image.base.name="${BASE}"
COPY requirements-deploy.txt /build/
RUN python3 -m venv /opt/fedloom && /opt/fedloom/bin/pip install --no-cache-dir --require-hashes -r /build/requirements-deploy.txt
COPY packages /build/packages
RUN /opt/fedloom/bin/pip install --no-cache-dir --no-deps --no-build-isolation /build/packages/fedloom /build/packages/fedloom-clinic /build/packages/fedloom-sites && rm -r /build
USER 1000:1000
