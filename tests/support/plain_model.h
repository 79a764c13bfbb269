// A Llama in double, written from the model's formulas alone: no kernel, page, plan or layer of the engine is in it.
// Its weights can be saved as a checkpoint, so that the engine runs the same model. For oracles of what happens inside
// of a model: queries and keys of every layer, and attention.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace spl::test {

class PlainModel {
 public:
  using Matrix = std::vector<double>;  // row after row

  struct Shape {
    int32_t layers = 4, q_heads = 4, kv_heads = 2, head_dim = 16, hidden = 64, ffn = 96, vocab = 512;
    double theta = 10000;
  };

  // Matrices are normal with standard deviation `spread` over the root of their width, embeddings normal with 1,
  // norms 1.
  PlainModel(const Shape& shape, std::mt19937& random, double spread) : shape_(shape) {
    const auto fill = [&](const std::string& name, int32_t rows, int32_t columns, double deviation) {
      std::normal_distribution<double> normal(0, deviation);
      Matrix& values = tensors_[name].values;
      tensors_[name].shape = {rows, columns};
      values.resize(static_cast<size_t>(rows) * static_cast<size_t>(columns));
      for (double& value : values) value = static_cast<float>(normal(random));
    };
    const auto ones = [&](const std::string& name) {
      tensors_[name] = {{shape.hidden}, Matrix(static_cast<size_t>(shape.hidden), 1.0)};
    };
    const double of_hidden = spread / std::sqrt(shape.hidden), of_ffn = spread / std::sqrt(shape.ffn);
    fill("model.embed_tokens.weight", shape.vocab, shape.hidden, 1);
    ones("model.norm.weight");
    for (int32_t i = 0; i < shape.layers; ++i) {
      ones(Name(i, "input_layernorm"));
      ones(Name(i, "post_attention_layernorm"));
      fill(Name(i, "self_attn.q_proj"), shape.q_heads * shape.head_dim, shape.hidden, of_hidden);
      fill(Name(i, "self_attn.k_proj"), shape.kv_heads * shape.head_dim, shape.hidden, of_hidden);
      fill(Name(i, "self_attn.v_proj"), shape.kv_heads * shape.head_dim, shape.hidden, of_hidden);
      fill(Name(i, "self_attn.o_proj"), shape.hidden, shape.q_heads * shape.head_dim, of_hidden);
      fill(Name(i, "mlp.gate_proj"), shape.ffn, shape.hidden, of_hidden);
      fill(Name(i, "mlp.up_proj"), shape.ffn, shape.hidden, of_hidden);
      fill(Name(i, "mlp.down_proj"), shape.hidden, shape.ffn, of_ffn);
    }
  }

  static std::string Name(int32_t layer, const std::string& what) {
    return "model.layers." + std::to_string(layer) + "." + what + ".weight";
  }
  const Shape& shape() const { return shape_; }
  // To plant something. Values must be floats.
  Matrix& at(const std::string& name) { return tensors_.at(name).values; }

  // Writes config.json and model.safetensors in f32 into the folder.
  void Save(const std::string& folder) const {
    std::ofstream(folder + "/config.json")
        << R"({"architectures":["LlamaForCausalLM"],"tie_word_embeddings":true,"eos_token_id":1,"rms_norm_eps":1e-5,)"
        << R"("torch_dtype":"float32","max_position_embeddings":8192,"rope_theta":)" << shape_.theta
        << ",\"hidden_size\":" << shape_.hidden << ",\"intermediate_size\":" << shape_.ffn
        << ",\"num_hidden_layers\":" << shape_.layers << ",\"num_attention_heads\":" << shape_.q_heads
        << ",\"num_key_value_heads\":" << shape_.kv_heads << ",\"head_dim\":" << shape_.head_dim
        << ",\"vocab_size\":" << shape_.vocab << "}";
    std::string header = "{";
    std::vector<float> data;
    for (const auto& [name, tensor] : tensors_) {
      const size_t begin = data.size() * sizeof(float);
      data.insert(data.end(), tensor.values.begin(), tensor.values.end());
      std::string dims;
      for (const int32_t dim : tensor.shape) dims += (dims.empty() ? "" : ",") + std::to_string(dim);
      header += (header.size() > 1 ? ",\"" : "\"") + name + R"(":{"dtype":"F32","shape":[)" + dims +
                R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(data.size() * sizeof(float)) +
                "]}";
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t size = header.size();
    std::ofstream out(folder + "/model.safetensors", std::ios::binary);
    out.write(reinterpret_cast<const char*>(&size), sizeof(size));
    out.write(header.data(), static_cast<std::streamsize>(size));
    out.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size() * sizeof(float)));
    ASSERT_TRUE(out.good());
  }

  // One layer's queries and keys, rotated, its values, and its keys before they are rotated: [token, heads * head_dim].
  struct Heads {
    Matrix q, k, v, plain_k;
  };
  // Keys and values of positions [target, target + count) are those of `source`, which has as many layers, from
  // position `begin` on.
  struct Copy {
    int32_t target = 0, count = 0;
    const std::vector<Heads>* source = nullptr;
    int32_t begin = 0;
  };
  // Those of layers [0, layers), of a full causal forward pass. Only keys and values of `copies` mean anything there.
  std::vector<Heads> Forward(std::span<const int32_t> tokens, int32_t layers, std::span<const Copy> copies = {}) const {
    const size_t hidden = static_cast<size_t>(shape_.hidden), count = tokens.size();
    std::vector<Heads> all;
    Matrix x;
    const Matrix& embedding = tensors_.at("model.embed_tokens.weight").values;
    for (const int32_t token : tokens) {
      const auto row = embedding.begin() + static_cast<int64_t>(token) * shape_.hidden;
      x.insert(x.end(), row, row + shape_.hidden);
    }
    for (int32_t i = 0; i < layers; ++i) {
      const Matrix normed = Normed(x, Name(i, "input_layernorm"));
      Heads heads{.q = Product(normed, hidden, Name(i, "self_attn.q_proj")),
                  .k = {},
                  .v = Product(normed, hidden, Name(i, "self_attn.v_proj")),
                  .plain_k = Product(normed, hidden, Name(i, "self_attn.k_proj"))};
      for (const Copy& copy : copies) {
        const Heads& source = (*copy.source)[static_cast<size_t>(i)];
        const auto width = static_cast<int64_t>(KvWidth());
        std::copy_n(source.plain_k.begin() + copy.begin * width, copy.count * width,
                    heads.plain_k.begin() + copy.target * width);
        std::copy_n(source.v.begin() + copy.begin * width, copy.count * width, heads.v.begin() + copy.target * width);
      }
      heads.k = heads.plain_k;
      Rotate(heads.q, shape_.q_heads);
      Rotate(heads.k, shape_.kv_heads);
      const size_t width = static_cast<size_t>(shape_.q_heads * shape_.head_dim);
      Matrix attended(count * width);
      for (int32_t h = 0; h < shape_.q_heads; ++h) {
        for (size_t row = 0; row < count; ++row) {
          const std::vector<double> weights = Attention(heads, h, static_cast<int32_t>(row));
          for (size_t j = 0; j <= row; ++j) {
            const double* const value = &heads.v[j * KvWidth() + HeadOffset(h / Group())];
            for (int32_t c = 0; c < shape_.head_dim; ++c)
              attended[row * width + HeadOffset(h) + static_cast<size_t>(c)] += weights[j] * value[c];
          }
        }
      }
      Add(x, Product(attended, width, Name(i, "self_attn.o_proj")));
      const Matrix mid = Normed(x, Name(i, "post_attention_layernorm"));
      Matrix gate = Product(mid, hidden, Name(i, "mlp.gate_proj"));
      const Matrix up = Product(mid, hidden, Name(i, "mlp.up_proj"));
      for (size_t j = 0; j < gate.size(); ++j) gate[j] = gate[j] / (1 + std::exp(-gate[j])) * up[j];
      Add(x, Product(gate, static_cast<size_t>(shape_.ffn), Name(i, "mlp.down_proj")));
      all.push_back(std::move(heads));
    }
    return all;
  }

  // softmax(q k / sqrt(d)) of one row and query head over positions [0, row].
  std::vector<double> Attention(const Heads& heads, int32_t q_head, int32_t row) const {
    const size_t q_width = static_cast<size_t>(shape_.q_heads * shape_.head_dim);
    const double* const q = &heads.q[static_cast<size_t>(row) * q_width + HeadOffset(q_head)];
    std::vector<double> weights(static_cast<size_t>(row) + 1);
    for (size_t j = 0; j < weights.size(); ++j) {
      const double* const k = &heads.k[j * KvWidth() + HeadOffset(q_head / Group())];
      for (int32_t c = 0; c < shape_.head_dim; ++c) weights[j] += q[c] * k[c];
      weights[j] /= std::sqrt(shape_.head_dim);
    }
    const double most = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - most);
    for (double& weight : weights) weight /= sum;
    return weights;
  }

 private:
  struct Tensor {
    std::vector<int32_t> shape;
    Matrix values;
  };

  int32_t Group() const { return shape_.q_heads / shape_.kv_heads; }
  size_t KvWidth() const { return static_cast<size_t>(shape_.kv_heads * shape_.head_dim); }
  size_t HeadOffset(int32_t head) const { return static_cast<size_t>(head * shape_.head_dim); }

  static void Add(Matrix& x, const Matrix& more) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += more[i];
  }
  // x [rows, width] times the transposed matrix of this name.
  Matrix Product(const Matrix& x, size_t width, const std::string& name) const {
    const Matrix& w = tensors_.at(name).values;
    const size_t rows = x.size() / width, columns = w.size() / width;
    Matrix out(rows * columns);
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < columns; ++c) {
        double sum = 0;
        for (size_t i = 0; i < width; ++i) sum += x[r * width + i] * w[c * width + i];
        out[r * columns + c] = sum;
      }
    }
    return out;
  }
  Matrix Normed(const Matrix& x, const std::string& name) const {
    const Matrix& w = tensors_.at(name).values;
    Matrix out = x;
    for (size_t r = 0; r < x.size(); r += w.size()) {
      double squares = 0;
      for (size_t i = 0; i < w.size(); ++i) squares += x[r + i] * x[r + i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(w.size()) + 1e-5);
      for (size_t i = 0; i < w.size(); ++i) out[r + i] *= scale * w[i];
    }
    return out;
  }
  // Pairs (c, c + d / 2) of every head, by position times theta^(-2c/d).
  void Rotate(Matrix& x, int32_t heads) const {
    const int32_t half = shape_.head_dim / 2;
    const size_t width = static_cast<size_t>(heads * shape_.head_dim);
    for (size_t r = 0; r * width < x.size(); ++r) {
      for (int32_t h = 0; h < heads; ++h) {
        for (int32_t c = 0; c < half; ++c) {
          const double angle = static_cast<double>(r) * std::pow(shape_.theta, -2.0 * c / shape_.head_dim);
          double& a = x[r * width + HeadOffset(h) + static_cast<size_t>(c)];
          double& b = x[r * width + HeadOffset(h) + static_cast<size_t>(c + half)];
          const double turned = a * std::cos(angle) - b * std::sin(angle);
          b = b * std::cos(angle) + a * std::sin(angle);
          a = turned;
        }
      }
    }
  }

  const Shape shape_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace spl::test
