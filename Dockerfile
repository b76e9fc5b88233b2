# A server in a container (docs/containers.md). The CUDA libraries come as Python packages: a GPU needs no other base.
#
#   docker build -t jaxinfer .                                        # CPU
#   docker build -t jaxinfer:cuda13 --build-arg EXTRA=cuda13 .        # or cuda12, after the host's driver

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRA=""
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY jaxinfer jaxinfer
COPY pallas_kernels pallas_kernels
RUN python -m venv /opt/jaxinfer \
    && /opt/jaxinfer/bin/python -m pip install --no-cache-dir ".${EXTRA:+[$EXTRA]}"

FROM python:${PYTHON}-slim-bookworm
RUN useradd --uid 10001 --create-home jaxinfer \
    && install --directory --owner jaxinfer /var/cache/jaxinfer
COPY --from=build /opt/jaxinfer /opt/jaxinfer
COPY configs/deployments/container.yaml /etc/jaxinfer/serve.yaml
# What the NVIDIA container toolkit looks for; nothing without one.
ENV PATH=/opt/jaxinfer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/jaxinfer
VOLUME /var/cache/jaxinfer
EXPOSE 8000 50051 9464
# Alive, not ready: a model that loads for an hour is no reason to start again.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/health', timeout=4)"]
ENTRYPOINT ["jaxinfer"]
CMD ["serve", "--config", "/etc/jaxinfer/serve.yaml"]
