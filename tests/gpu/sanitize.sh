#!/usr/bin/env bash
# Small cases of every operation under compute-sanitizer: memcheck and racecheck, all runs at once on one GPU, one line each. Exit status 1 if any failed.
#
#     bash tests/gpu/sanitize.sh [FOLDER_FOR_LOGS] [OPERATION ...]        operations: attend latent select score encode step
#
# memcheck runs without torch's caching allocator, which puts many tensors into one allocation and so hides what lies just outside of one; no case here
# captures a graph, because that needs the allocator. racecheck looks at the CUDA kernels only: it slows a kernel down by hundreds of times. Latent
# attention it is not asked about: its warps have roles and meet at signals (mbarrier, waited for by parity; bar.arrive), and racecheck follows neither, so
# that it reports every page that one warp writes and another one reads.
set -u
cd "$(dirname "$0")/../.."
LOGS=${1:-$(mktemp -d)}
ALL=(attend latent select score encode step)
OPERATIONS=("${@:2}")
[ ${#OPERATIONS[@]} = 0 ] && OPERATIONS=("${ALL[@]}")
for name in "${OPERATIONS[@]}"; do
  [[ " ${ALL[*]} " == *" $name "* ]] || { echo "there is no operation $name; use ${ALL[*]}"; exit 2; }
done
LIMIT=${SANITIZE_LIMIT:-110}
mkdir -p "$LOGS"
export OMP_NUM_THREADS=1 PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}"

ATTEND=(
  'test_attend.py::test_groups[5-cuda]'
  'test_attend.py::test_every_way_of_merging[128-4-False-few-1]'
  'test_attend.py::test_every_way_of_merging[128-4-False-few-8]'
)
SELECT=(
  'test_select.py::test_every_length_up_to_capacity[threshold-softmax-0-cuda]'
  'test_select.py::test_every_length_up_to_capacity[budget-softmax-4-cuda]'
  'test_select.py::test_any_cluster_selects_the_same[35]'
  'test_select.py::test_any_cluster_selects_the_same[37]'
  'test_select.py::test_any_cluster_selects_the_same_for_wide_groups[2]'
)
SCORE=(
  'test_score_sketch.py::test_every_split_of_the_preparation[5-5-torch.bfloat16]'
  'test_score_sketch.py::test_every_split_of_the_preparation[9-5-torch.float16]'
  'test_score_sketch.py::test_huge_logits_stay_finite[cuda]'
  'test_score_sketch.py::test_warps_of_a_block_have_one_head_or_several[8-20]'
  'test_score_sketch.py::test_requests_that_are_attended_whole_are_left_alone[16-False]'
  'test_score_sketch.py::test_requests_that_are_attended_whole_are_left_alone[33-False]'
)
ENCODE=(
  'test_encode.py::test_sketch_shapes_dtypes_and_strides[tokens-128-torch.bfloat16-cuda many]'
  'test_encode.py::test_sketch_shapes_dtypes_and_strides[tokens-128-torch.bfloat16-cuda few]'
  'test_encode.py::test_sketch_shapes_dtypes_and_strides[interleaved-256-torch.float8_e4m3fn-cuda many]'
  'test_encode.py::test_few_slots_in_windows_of_every_size[576-1-33]'
  'test_encode.py::test_layers_get_the_records_that_each_gets_alone[128-torch.bfloat16]'
  'test_encode.py::test_page_selectors[rki4-{}-128-torch.bfloat16-cuda]'
  'test_write_cache.py::test_rows_go_where_their_slots_say[dtype0-128-128-17-pairs]'
  'test_write_cache.py::test_rows_of_a_tier_go_to_its_pool_and_to_its_hot_copies[1-48-dtype0-128-17-3]'
  'test_write_cache.py::test_rows_of_a_tier_go_to_its_pool_and_to_its_hot_copies[2-16-dtype1-64-17-8]'
)
STEP=(
  'test_step.py::test_step_is_the_torch_step[budget0-sketch-cuda]'
  'test_step.py::test_step_is_the_torch_step[threshold-sketch-cuda]'
  'test_step.py::test_step_is_the_torch_step[coverage-sketch-cuda]'
)
LATENT=(
  'test_attend_latent.py::test_any_sharing_gives_the_same[3-bfloat16]'
  'test_attend_latent.py::test_any_group[17-float16]'
  'test_attend_latent.py::test_any_count[33]'
)
# memcheck only: more of the CUDA kernels, and the Triton ones.
ATTEND_MORE=('test_attend.py::test_selections_and_layouts[packed-64-with_open-cuda]' 'test_attend.py::test_a_count_of_zero_and_a_full_table[cuda]'
  'test_attend.py::test_groups[5-triton]')
SELECT_MORE=('test_select.py::test_any_cluster_selects_the_same_for_wide_groups[0]' 'test_select.py::test_every_length_up_to_capacity[coverage-softmax-9-cuda]'
  'test_select.py::test_lengths_beyond_the_scores_stay_inside_every_buffer' 'test_select.py::test_every_length_up_to_capacity[budget-softmax-4-triton]')
SCORE_MORE=('test_score_sketch.py::test_every_split_of_the_preparation[33-1-torch.bfloat16]' 'test_score_sketch.py::test_a_query_in_parts_is_scored_like_one_in_one_piece[17-3-192-160]'
  'test_score_sketch.py::test_huge_logits_stay_finite[triton]'
  'test_score_pages.py::test_scores_of_every_group_and_head_dim[rki4-{}-5-128-cuda]'
  'test_score_pages.py::test_scores_of_every_group_and_head_dim[rki4-{}-5-128-triton]')
ENCODE_MORE=('test_encode.py::test_every_kind_of_step[sketch-cuda few-beyond the records]'
  'test_encode.py::test_every_kind_of_step[sketch-cuda many-beyond the records]' 'test_encode.py::test_every_kind_of_step[sketch-cuda many-17 tokens]'
  'test_encode.py::test_page_selectors[clse-{}-96-torch.float16-cuda]' 'test_encode.py::test_every_kind_of_step[sketch-triton-17 tokens]')
LATENT_MORE=('test_attend_latent.py::test_any_group[128-bfloat16]' 'test_attend_latent.py::test_any_sharing_gives_the_same[16-float16]')
STEP_MORE=('test_step.py::test_step_is_the_torch_step[budget0-rki4-cuda]' 'test_step.py::test_step_is_the_torch_step[budget0-sketch-triton]')

# The option that limits a tool to kernels by name has changed its own name; without it racecheck is only slower.
OURS=()
for option in --kernel-regex --kernel-name; do
  if compute-sanitizer --help 2>&1 | grep -qE -- "$option( |,|$)" &&
    ! compute-sanitizer "$option" kns=kvskim true 2>&1 | grep -qiE 'unrecogni|unknown|invalid'; then
    OURS=("$option" kns=kvskim)
    break
  fi
done

run() { # tool, name, node ids
  local tool=$1 name=$2 log="$LOGS/$1-$2.log" filter=() code
  shift 2
  [ "$tool" = racecheck ] && filter=(${OURS[@]+"${OURS[@]}"})
  [ "$tool" = memcheck ] && export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  timeout "$LIMIT" compute-sanitizer --tool "$tool" --launch-timeout 120 --error-exitcode 7 ${filter[@]+"${filter[@]}"} \
    python3 -m pytest -q -p no:cacheprovider --tb=short "${@/#/tests/gpu/}" > "$log" 2>&1
  code=$?
  echo "$tool $name: exit status $code of $# cases: $(grep -E 'passed|failed|no tests ran|ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -3 | tr '\n' ' ')"
  echo "$code" > "$LOGS/$tool-$name.status"
}

RESULTS=()
for name in "${OPERATIONS[@]}"; do
  declare -n cases=${name^^} more=${name^^}_MORE
  tools=(memcheck racecheck)
  [ "$name" = latent ] && tools=(memcheck)
  for tool in "${tools[@]}"; do
    RESULTS+=("$LOGS/$tool-$name.status")
    rm -f "${RESULTS[-1]}"  # of a run before this one
    [ "$tool" = memcheck ] && chosen=("${cases[@]}" "${more[@]}") || chosen=("${cases[@]}")
    (run "$tool" "$name" "${chosen[@]}") &
  done
done
wait
[ "$(cat "${RESULTS[@]}" | grep -cx 0)" = ${#RESULTS[@]} ]
