# Penstock in a container. See docs/kubernetes.md.
#
# The node of a machine, or `penstock plan` and the other tools (no GPU code):
#   docker build -t penstock:0.1.0 .
# vLLM with Penstock's connector:
#   docker build --build-arg BASE_IMAGE=vllm/vllm-openai:v0.32.0 -t penstock-vllm:0.1.0-vllm0.32.0 .
# `penstock serve` with the embedded engine, on a CPU:
#   docker build --build-arg EXTRAS=engine,server,redis,s3,encryption \
#     --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu -t penstock-serve:0.1.0 .
# and on a GPU:
#   docker build --build-arg BASE_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#     --build-arg EXTRAS=engine,server,redis,s3,encryption,cuda -t penstock-serve:0.1.0-cuda .
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG EXTRAS=redis,s3,encryption
ARG PIP_EXTRA_INDEX_URL=

# Images for CUDA have no Python. Debian's and Ubuntu's pip refuses to install next to packages of
# the system, which is the aim here: Penstock is imported by the vLLM of the base image.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# hadolint ignore=DL3008
RUN if ! python3 -m pip --version > /dev/null 2>&1; then \
      apt-get update \
      && apt-get install -y --no-install-recommends python3 python3-pip \
      && rm -rf /var/lib/apt/lists/*; \
    fi
COPY constraints.txt /opt/penstock/
# Next to vLLM, nothing that is installed changes its version.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    set -- /wheels/*.whl \
    && cp /opt/penstock/constraints.txt /tmp/constraints.txt \
    && if python3 -c "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"; \
       then python3 -m pip list --format=freeze > /tmp/constraints.txt; \
       fi \
    && python3 -m pip install -c /tmp/constraints.txt "$1[$EXTRAS]" \
    && rm /tmp/constraints.txt \
    && penstock --version

# The numbers are those of deploy/kubernetes: a node, and engines that may attach to it.
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --create-home penstock \
    && groupadd --gid 10002 engine \
    && useradd --uid 10002 --gid 10002 --groups penstock --create-home engine
USER 10001:10001
WORKDIR /home/penstock
ENTRYPOINT []
CMD ["penstock", "--help"]
