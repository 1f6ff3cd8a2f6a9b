#!/usr/bin/env bash
# The whole way on two CPU cores: make a model and data, convert, train on 2 pipeline stages, export, generate.
# `make demo` runs it; each command below is the one that a user types. MASTER_PORT=29501 beside another run.
set -euo pipefail
cd "$(dirname "$0")/.."
demo=outputs/demo

# Prints the command so that it can be pasted, and runs it
run() {
    local word said=
    for word; do [[ $word == *\ * ]] && said+=" \"$word\"" || said+=" $word"; done
    printf '\n$%s\n' "$said" >&2
    "$@"
}

# NCCL refuses two ranks on one GPU, so with one GPU both stages run on the CPU
if [[ -z ${DS_ACCELERATOR:-} && $(python -c 'import torch; print(torch.accelerator.device_count())') == 1 ]]; then
    run export DS_ACCELERATOR=cpu
fi
run python scripts/make_demo.py --output_dir $demo
run python convert2ckpt.py --model_name_or_path $demo/model --output_dir $demo/checkpoint --overwrite
run deepspeed --quiet --num_gpus 2 ${MASTER_PORT:+--master_port "$MASTER_PORT"} trainer_base_ds_mp.py -cn llama_tiny_pp2 overwrite_output_dir=true "$@"
run python scripts/generate.py --model_name_or_path $demo/hf --prompt "What does json.dumps do?" "What is threading.Lock?"
run python scripts/report.py $demo
