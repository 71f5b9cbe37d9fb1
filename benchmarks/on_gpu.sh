#!/usr/bin/env bash
# Everything that needs a GPU machine, in parts with a time limit each, in the order in which a doubt should stop it:
#
#   bash benchmarks/on_gpu.sh check exact speed pieces floors host recording curve1 curve2 curve3 peers fit cores matmul tuning accuracy
#   seconds, about:           190   230   480   40     25     60   150       490    400    400    420   130 290   100    290    340
#   loops, in this order (issue 26; 30 minutes in all, each in a call of its own):
#   lengths heads others first others2
#   420     330   560    400   330
#   and: state (560 each; the log says with which state:FIRST to go on), tiled_training (120), predicted_workers (120), claims:0 claims:1 claims:2 (up to 580 each; 16 cores, no GPU)
#
# `peers:vit_l` (or another network) is `peers` for that one. Nothing is timed in `exact`, `tests` (but its last part) and
# `compiled` (what `peers` would wait for the compiler): `for part in tests compiled; do bash benchmarks/on_gpu.sh $part & done`.
#
# Results and logs go to $OUT (default: benchmarks/results), one file a part. `cores` uses all CPU cores, the others but
# `check` the whole GPU: run nothing beside them. MNIST and CIFAR-10 are looked for in $DATA (default: .carry), which
# benchmarks/carry.sh fills.
set -u
out=${OUT:-benchmarks/results}
data=${DATA:-.carry}
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1
mkdir -p "$out"

run() { # name, seconds, command...: its output to a log, its last lines here
    local name=$1 limit=$2
    shift 2
    timeout -s INT "$limit" "$@" >"$out/$name.log" 2>&1
    echo "== $name: exit $? after $SECONDS s in all"
    grep -v "^ROW " "$out/$name.log" | tail -n 6
}
slowdown() { # network, seconds, methods, more...
    local network=$1 limit=$2 methods=$3
    shift 3
    run "slowdown_${part}_$network" "$limit" python -m benchmarks.slowdown --networks "$network" --methods "$methods" \
        --limit-s $((limit - 5)) --out "$out/slowdown_${part}_$network.json" "$@"
}

for part in "${@:-check}"; do
    case $part in
    check)
        run allocator 150 python -m pytest -q --tb=short -p no:cacheprovider tests/gpu/test_allocator.py tests/gpu/test_fused.py \
            tests/gpu/test_common_ops.py
        run exactness_llama 150 python -m benchmarks.exactness --networks llama --steps 10 --no-repeat \
            --out "$out/exactness_llama.json" &
        run same_numbers 150 python -m pytest -q --tb=short -rs -p no:cacheprovider tests/gpu/test_same_numbers.py \
            -k "transformer or bert or llama or autocast" &
        wait
        ;;
    exact) # every network at full size, bit for bit, and what no CPU can test; nothing here is timed, so two at a time
        run exactness_1 580 python -m benchmarks.exactness --networks llama,vgg16_nhwc,r3d18_nhwc --no-repeat \
            --out "$out/exactness_1.json" &
        {
            run gpu_tests 150 python -m pytest -q --tb=short -rs -p no:cacheprovider tests/gpu/tuning tests/gpu/elastic \
                tests/gpu/test_fused.py tests/gpu/test_switches.py tests/gpu/test_common_ops.py
            run exactness_2 430 python -m benchmarks.exactness --networks resnet50,resnet152,vit_l --no-repeat \
                --out "$out/exactness_2.json"
        } &
        wait
        ;;
    speed) # every network at its budget in the README
        slowdown resnet152 70 in-core,hybrid --traces "$out"
        slowdown resnet50 84 in-core,hybrid --traces "$out"
        slowdown llama 190 in-core,hybrid --traces "$out"
        slowdown vgg16_nhwc 75 in-core,hybrid
        slowdown r3d18_nhwc 60 in-core,hybrid
        slowdown vit_l 115 in-core,hybrid
        ;;
    pieces)
        run pieces 60 python -m benchmarks.pieces --out "$out/pieces.json"
        ;;
    floors)
        run floors 60 python -m benchmarks.floors --out "$out/floors.json"
        ;;
    host)
        run host 80 python -m benchmarks.host --out "$out/host.json"
        ;;
    forward)
        run forward 300 python -m benchmarks.host --forward --networks bert_large,gpt2 --steps 20 --out "$out/forward.json"
        ;;
    recording)
        run recording 170 python -m benchmarks.recording --out "$out/recording.json"
        ;;
    compiled) # fills the compiler's cache for `peers:...` on the same machine, 460 s beside tests; 0.28: the share of
        # memory that it has there. ResNet-152's with a budget took 143 s.
        compile_ahead() { # network, share
            run "compiled_$1" 290 python -m benchmarks.slowdown --networks "$1" --methods "compile,compile-budget:$2" \
                --steps 1 --limit-s 280 --out "$out/compiled_$1.json"
        }
        { compile_ahead resnet152 0.28; compile_ahead vit_l 0.29; } &
        { compile_ahead vgg16_nhwc 0.64; compile_ahead r3d18_nhwc 0.59; compile_ahead llama 0.26; } &
        wait
        ;;
    tests) # all of tests/gpu, most of it in three processes
        run tests_1 240 python -m pytest -q --tb=short -rs -p no:cacheprovider tests/gpu/test_same_numbers.py &
        run tests_2 240 python -m pytest -q --tb=short -rs -p no:cacheprovider tests/gpu/test_allocator.py \
            tests/gpu/test_switches.py tests/gpu/test_tiling.py tests/gpu/tiling &
        run tests_3 240 python -m pytest -q --tb=short -rs -p no:cacheprovider tests/gpu/test_common_ops.py tests/gpu/test_fused.py \
            tests/gpu/test_sums_in_place.py tests/gpu/elastic &
        wait
        run tests_4 60 python -m pytest -q --tb=short -rs -p no:cacheprovider tests/gpu/tuning # these time steps
        ;;
    curve1)
        slowdown resnet50 230 in-core,checkpoint,hybrid --curve
        slowdown vit_l 290 in-core,checkpoint,hybrid --curve
        ;;
    curve2)
        slowdown llama 430 in-core,checkpoint,hybrid --curve
        slowdown vgg16_nhwc 115 in-core,checkpoint,hybrid --curve
        ;;
    curve3)
        slowdown resnet152 240 in-core,checkpoint,hybrid --curve
        slowdown r3d18_nhwc 210 in-core,checkpoint,hybrid --curve
        ;;
    peers | peers:*)
        network=${part#peers} network=${network#:} part=peers
        slowdown "${network:-resnet50}" 420 in-core,hybrid,checkpoint,selective,compile-budget,compile,pooch,swap,swap-all,trl-offload,save_on_cpu
        ;;
    fit)
        run fit 130 python -m benchmarks.fit --questions batch --limit-s 60 \
            --methods in-core,checkpoint,selective,hybrid --out "$out/fit.json"
        ;;
    lengths) # a Llama whose lengths change: everything counts; peers in the same run
        run lengths 430 python -m benchmarks.lengths --loops multiples,integers --limit-s 100 --out "$out/lengths.json"
        ;;
    heads) # the networks of the issue that are bound by the host: over checkpointing, over the bound, the host's forward
        run networks_heads 340 python -m benchmarks.slowdown --networks bert_large,gpt2,efficientnet_v2_m \
            --methods in-core,checkpoint,hybrid --warm-s 25 --limit-s 110 --out "$out/networks_heads.json"
        ;;
    others)
        run networks_others 580 python -m benchmarks.slowdown --networks qwen2,unet3d,t5,swin_b,convnext_b \
            --methods in-core,checkpoint,hybrid --warm-s 25 --limit-s 112 --out "$out/networks_others.json"
        ;;
    others2)
        run networks_others2 350 python -m benchmarks.slowdown --networks deeplabv3,whisper,densenet201,mobilenet_v3_large \
            --methods in-core,checkpoint,hybrid --warm-s 20 --limit-s 84 --out "$out/networks_others2.json"
        ;;
    first) # first_steps_s of a cold run and of one that finds its plans: over as many settled steps
        export OUTCORE_CACHE="$out/cache.$$"
        for run in cold warm; do
            run "first_${run}_resnet50" 90 python -m benchmarks.slowdown --networks resnet50 --methods hybrid --steps 5 \
                --limit-s 85 --out "$out/first_${run}_resnet50.json"
            run "first_${run}_llama" 115 python -m benchmarks.slowdown --networks llama --methods hybrid --steps 5 \
                --limit-s 110 --out "$out/first_${run}_llama.json"
        done
        rm -rf "$OUTCORE_CACHE"
        unset OUTCORE_CACHE
        ;;
    cores)
        run elastic 290 python benchmarks/elastic.py --data "$data/mnist" \
            --only cores,messages,scaling,levels,partition --out "$out/elastic.json"
        ;;
    claims:[0-9]*) # to 98.5 % of MNIST, one seed a part; then `elastic_claims.py merge --parts` on the three files
        run "claims_${part#*:}" 590 python benchmarks/elastic_claims.py mnist --data "$data/mnist" --seeds 1 \
            --first-seed "${part#*:}" --limit-s 580 --out "$out/claims-${part#*:}.json"
        ;;
    predicted_workers)
        run predicted_workers 150 python benchmarks/elastic_claims.py prediction --data "$data/mnist" --limit-s 140 \
            --out "$out/predicted_workers.json"
        ;;
    tiled_training)
        run tiled_training 240 python -m benchmarks.tiled_training --limit-s 200 --out "$out/tiled_training.json"
        ;;
    matmul)
        run matmul 100 python benchmarks/matmul.py --only green,linear,fp32,bf16,tf32,links --limit-s 85 \
            --out "$out/matmul.json"
        ;;
    tuning)
        run tuning 290 python -m benchmarks.tuning --only curve,choice --networks resnet50,vit_b --limit-s 70 \
            --out "$out/tuning.json"
        ;;
    accuracy)
        run tuning_accuracy 350 python -m benchmarks.tuning_accuracy --only accuracy --data "$data/cifar10.npz" \
            --optimizers sgd --num-epochs 2.25 --target 0.65 --first-seed 100 --num-trials 8 --num-pairs 24 --limit-s 325 \
            --out "$out/tuning_accuracy.json"
        ;;
    state*)
        first=${part#state} first=${first#:}
        run "state_${first:-0}" 590 env PYTHONPATH="$PYTHONPATH:$data/peers" python -m benchmarks.state \
            --first "${first:-0}" --total-s 560 --out "$out/state_${first:-0}.json"
        ;;
    *) echo "there is no part $part; see the head of this file" >&2 && exit 2 ;;
    esac
done
