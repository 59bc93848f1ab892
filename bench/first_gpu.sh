#!/usr/bin/env bash
# The first minutes on a machine with a new GPU: what is there, does it compute right, how fast is it.
#
#     bash bench/first_gpu.sh [WHEELS]        in the root of a checkout; at most 7 minutes
#
# WHEELS: a folder with lowshard's wheel and what the machine lacks, perhaps a libnccl.so.2, see docs/bare-machine.md;
# without it the lowshard that is installed is taken. Each step has its limit and its log in first_gpu/ (or $OUT), beside
# selftest.json and the benchmarks' figures; first_gpu.tgz there has all of it. The GPU's clocks are left alone.
out=$(realpath -m "${OUT:-first_gpu}") root=$PWD failed="" wheels=${1:+$(realpath "$1")}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 NCCL_DEBUG=WARN LOWSHARD_TIMEOUT_S="${LOWSHARD_TIMEOUT_S:-30}"
step() { # NAME LIMIT_S COMMAND...: runs a step and shows the end of its log; $SHOW is the number of lines
    local name=$1 limit=$((SECONDS + $2 < 420 ? $2 : 420 - SECONDS)) begin=$SECONDS code=0; shift 2
    [ "$limit" -ge 5 ] || { printf '\n== %s: left out, no time\n' "$name"; failed+=" $name"; return 1; }
    timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1 || { code=$?; failed+=" $name"; }
    printf '\n== %s: exit code %s, %s s of %s\n' "$name" "$code" "$((SECONDS - begin))" "$limit"
    tail -n "${SHOW:-6}" "$out/$name.txt" | cut -c1-200
    return "$code"
}
trap 'cd "$out" && tar czf first_gpu.tgz --exclude=*.tgz *' EXIT
step machine 20 sh -c 'nvidia-smi; nproc; df -h /dev/shm; python3 -m pip list | grep -iE "numpy|cupy|nccl|mpi|nvrtc|pytest"'
if [ -n "$wheels" ]; then
    step install 90 python3 -m pip install -q --no-index --no-deps "$wheels"/*.whl || exit 1
    [ ! -e "$wheels/libnccl.so.2" ] || export LD_PRELOAD="$wheels/libnccl.so.2"
fi
cd "$out" || exit 1 # the checkout's folders are no installation
SHOW=14 step doctor 45 python3 -m lowshard doctor
SHOW=60 step selftest 290 python3 -m lowshard selftest --device cuda -n 2 -o .
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2 NCCL_RUNTIME_CONNECT=0 # ranks share the GPU
for name in mxfp8 pack; do SHOW=24 step "$name" 45 python3 -m lowshard bench "$name" --device cuda --json "$name.json"; done
for way in nccl staged; do step "all_reduce_$way" 40 python3 -m lowshard bench all_reduce --ranks 2 --transport "$way"; done
step tests 150 python3 -m pytest -q "$root/tests/gpu"
setting='{"device": "cuda", "ranks": 2, "folder": ".", "limit_s": 60}'
step sanitizer 60 env -u LD_PRELOAD compute-sanitizer --error-exitcode 9 python3 -m lowshard.selftest kernels "$setting" sanitizer.json
printf '\n%s s; %s\n' "$SECONDS" "${failed:+failed:$failed; }logs in $out/first_gpu.tgz"
[ -z "$failed" ]
