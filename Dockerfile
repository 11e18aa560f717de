# The project with its pinned environment, for NVIDIA GPUs or, with DEVICE=cpu, for the CPU.
#   docker build -t llava .
#   docker build -t llava:cpu --build-arg DEVICE=cpu --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> .
#   docker run --rm -it --gpus all --ipc=host --init -v "$PWD/checkpoints:/llava/checkpoints" llava
# Build arguments
#   DEVICE=gpu|cpu        what the image is for (default: gpu)
#   EXTRAS=train,flash    extras of pyproject.toml (default: those of scripts/setup.sh); flash compiles flash-attn
#   MAX_JOBS=4            compilers at once, for flash-attn
#   CUDA=13.0.1           CUDA of the base image; the driver must support it, and PyTorch's build should match it
ARG DEVICE=gpu
ARG CUDA=13.0.1

FROM ubuntu:24.04 AS base-cpu
# `devel` has the CUDA compiler, which flash-attn and DeepSpeed's operators need.
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS base-gpu

# hadolint ignore=DL3006
FROM base-${DEVICE}
# Headers and a C++ compiler: DeepSpeed's operators and Triton's kernels are built on first use.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ git openssh-client pdsh python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 llava \
 && install -d -o llava -g llava /llava
USER 10001
WORKDIR /llava
COPY --chown=llava:llava . .
ARG EXTRAS="" PIP_EXTRA_INDEX_URL="" MAX_JOBS=4
RUN --mount=type=cache,target=/home/llava/.cache/pip,uid=10001,gid=10001 bash scripts/setup.sh
ENV PATH=/llava/.venv/bin:$PATH
CMD ["bash"]
