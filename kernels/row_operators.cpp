// Operators of torch for functions of row_dot.cpp, for float32, and row_block.cpp, behind which this text stands with
// row_norm.cpp. They are called from a compiled graph without Python; see row_operators.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <map>
#include <optional>

using torch::stable::Tensor;
using Dot = void (*)(const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t);

// Functions of other texts: attention by head width, and the product in bfloat16.
static std::map<int64_t, Attend> attention;
static Dot bfloat16_dot = nullptr;

extern "C" void set_attention(int64_t head_dim, Attend function) {
  attention[head_dim] = function;
}

extern "C" void set_bfloat16_dot(Dot function) {
  bfloat16_dot = function;
}

static Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

template <typename Number>
static Number* memory(const Tensor& tensor) {
  return static_cast<Number*>(tensor.data_ptr());
}

template <typename Number>
static Number* memory(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? memory<Number>(*tensor) : nullptr;
}

static int64_t width_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->size(1) : 0;
}

// Products of more than `most` rows are the library's.
static Tensor row_dot_operator(Tensor hidden, Tensor weight, int64_t most) {
  const int64_t rows = hidden.size(0), width = hidden.size(1), columns = weight.size(0);
  const auto kind = hidden.scalar_type();
  const bool is_float = kind == torch::headeronly::ScalarType::Float;
  const bool is_known = is_float || kind == torch::headeronly::ScalarType::BFloat16;
  const bool fits = kind == weight.scalar_type() && width == weight.size(1) && weight.is_contiguous();
  if (rows > most || !is_known || !fits) {
    return torch::stable::matmul(hidden, torch::stable::transpose(weight, 0, 1));
  }
  hidden = dense(hidden);
  const Tensor output = torch::stable::new_empty(hidden, {rows, columns});
  const int64_t threads = torch::stable::get_num_threads();
  if (is_float) {
    row_dot(memory<float>(hidden), memory<float>(weight), memory<float>(output), rows, width, columns, threads);
  } else {
    STD_TORCH_CHECK(bfloat16_dot != nullptr, "the product in bfloat16 was not compiled");
    bfloat16_dot(hidden.data_ptr(), weight.data_ptr(), output.data_ptr(), rows, width, columns, threads);
  }
  return output;
}

// Six weights a layer, and two norms behind or none.
static Tensor run_block_operator(
    std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<Tensor> weights, std::vector<Tensor> norms_behind,
    Tensor hidden, Tensor cos, Tensor sin, Tensor positions, Tensor sequences, Tensor cache_positions, Tensor planes,
    int64_t count, std::optional<Tensor> blocks, std::optional<Tensor> starts, std::optional<Tensor> seen,
    std::optional<Tensor> exits, int64_t head_dim, int64_t kv_heads, double epsilon, double scaling) {
  const auto attend = attention.find(head_dim);
  STD_TORCH_CHECK(attend != attention.end(), "attention of heads of ", head_dim, " numbers was not compiled");
  std::vector<Layer> layers;
  for (size_t index = 0; index < keys.size(); ++index) {
    const Tensor* own = weights.data() + 6 * index;
    const Tensor* behind = norms_behind.empty() ? nullptr : norms_behind.data() + 2 * index;
    layers.push_back(
        {memory<float>(own[0]), memory<float>(own[1]), memory<float>(own[2]), memory<float>(own[3]),
         memory<float>(own[4]), memory<float>(own[5]), memory<float>(keys[index]), memory<float>(values[index]),
         behind == nullptr ? nullptr : memory<float>(behind[0]), behind == nullptr ? nullptr : memory<float>(behind[1])});
  }
  hidden = dense(hidden);
  positions = dense(positions), sequences = dense(sequences);
  cache_positions = dense(cache_positions), planes = dense(planes);
  const Tensor output = torch::stable::empty_like(hidden);
  std::memcpy(output.data_ptr(), hidden.data_ptr(), hidden.numel() * sizeof(float));
  const int64_t total = keys[0].size(1);
  const bool ran = run_block(
      attend->second, layers.data(), layers.size(), memory<float>(output), memory<float>(cos), memory<float>(sin),
      memory<int64_t>(positions), memory<int64_t>(sequences), memory<int64_t>(cache_positions),
      memory<int64_t>(planes), memory<int64_t>(blocks), memory<int64_t>(starts), memory<bool>(seen),
      memory<int32_t>(exits), hidden.size(0), hidden.size(1), head_dim, weights[2].size(1) / head_dim, kv_heads,
      weights[5].size(1), (total - 1) / count, total, width_of(blocks), width_of(seen), width_of(exits), epsilon,
      scaling, torch::stable::get_num_threads(), cos.size(0));
  STD_TORCH_CHECK(ran, "a position is not in a rotary table of ", cos.size(0));
  return output;
}

STABLE_TORCH_LIBRARY_IMPL(sigma0, CPU, library) {
  library.impl("row_dot", TORCH_BOX(&row_dot_operator));
  library.impl("run_block", TORCH_BOX(&run_block_operator));
}
