# An image to train in: `docker build -t llm-pipeline .`; docs/containers.md says how it is used.
# torch's wheels bring CUDA's libraries along; of the base it takes the variables that let the driver in.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04

# g++ and Python's headers: for compile=true. ssh and pdsh: for the deepspeed launcher on several hosts
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev g++ openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/llm-pipeline

# Before the sources, so that a change to them installs nothing again. Without a GPU:
# --build-arg TORCH="--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
ARG TORCH="torch==2.13.0"
COPY requirements.lock ./
RUN python3 -m venv /opt/venv \
    && pip install $TORCH \
    && pip install --require-hashes -r requirements.lock

COPY . .
# Not root. outputs/ is a volume to mount at /outputs; models of the hub are kept there too
RUN useradd --uid 10001 --create-home trainer \
    && install --directory --owner=trainer /outputs \
    && ln -s /outputs outputs
ENV HF_HOME=/outputs/huggingface
USER 10001

# The first process of a container gets SIGTERM when it is stopped: this one lets the ranks save, `deepspeed` does not
ENTRYPOINT ["python", "scripts/supervise.py"]
CMD ["--help"]
