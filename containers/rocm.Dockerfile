# zaya_jax on AMD GPUs: docker build -f containers/rocm.Dockerfile -t zaya-jax:rocm .
#
#   docker run --rm -it --device /dev/kfd --device /dev/dri --group-add video \
#     --security-opt seccomp=unconfined --ipc host --ulimit memlock=-1 -v "$PWD/runs:/zaya_jax/runs" \
#     zaya-jax:rocm python -m zaya_jax.main --config configs/tiny.yaml
#
# The host needs the amdgpu driver; the image contains ROCm 7's user space and Python 3.12.
FROM rocm/dev-ubuntu-24.04:7.2.4-complete

RUN apt-get update \
  && apt-get install --yes --no-install-recommends python3 python3-venv \
  && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/zaya_jax
ENV PATH=/opt/zaya_jax/bin:$PATH PYTHONUNBUFFERED=1

WORKDIR /zaya_jax
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY zaya_jax zaya_jax
COPY pallas_kernels pallas_kernels
COPY configs configs
RUN pip install --no-cache-dir '.[rocm]' -c constraints.txt
