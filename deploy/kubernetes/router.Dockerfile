# The router from PyPI.
#   docker build -f deploy/kubernetes/router.Dockerfile -t vllm-router:0.1.16 .
FROM python:3.12-slim-bookworm
RUN pip install --no-cache-dir vllm-router==0.1.16 \
    && useradd --uid 10003 --create-home router
USER 10003
WORKDIR /home/router
CMD ["vllm-router", "--help"]
