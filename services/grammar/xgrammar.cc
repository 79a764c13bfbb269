// libsplice_xgrammar.so: grammars compiled and matched by xgrammar. Its exceptions and its headers stay in here.
#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "kernels/common/plugin.h"
#include "services/base/status.h"
#include "services/grammar/grammar_plugin.h"
#include "services/grammar/token_grammar.h"

namespace spl::grammar {
namespace {

// Set while a thread compiles: where the first warning goes.
thread_local std::string* compile_warning = nullptr;

}  // namespace
}  // namespace spl::grammar

// XGRAMMAR_LOG_CUSTOMIZE: errors are exceptions with the message alone. Warnings of a compile are about parts of a
// schema that it does not keep to; those of a matcher are about tokens that Accept refuses.
namespace xgrammar {
[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}
void LogMessageImpl(const std::string&, int, int, const std::string& message) {
  std::string* const warning = spl::grammar::compile_warning;
  if (warning != nullptr && warning->empty()) *warning = message;
}
}  // namespace xgrammar

namespace spl::grammar {
namespace {

// White space between two parts of a JSON text at most: a line end and the indentation of what is deeply nested.
constexpr int kMaxJsonSpace = 32;

class XMatcher final : public TokenMatcher {
 public:
  XMatcher(const xgrammar::CompiledGrammar& grammar, int32_t width) : matcher_(grammar), width_(width) {}

  void FillMask(std::span<uint32_t> mask) override {
    std::array<int64_t, 1> shape = {static_cast<int64_t>(mask.size())};
    DLTensor tensor = {};
    tensor.data = mask.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = xgrammar::GetBitmaskDLType();
    tensor.shape = shape.data();
    try {
      // False: every token may come, and the mask need not have been written.
      if (!matcher_.FillNextTokenBitmask(&tensor)) std::memset(mask.data(), 0xff, mask.size_bytes());
    } catch (const std::exception&) {
      std::memset(mask.data(), 0, mask.size_bytes());
    }
  }

  absl::Status Accept(int32_t token) override {
    if (token < 0 || token >= width_) return InvalidArgument("token {} is outside the vocabulary of {}", token, width_);
    try {
      if (!ended() && matcher_.AcceptToken(token)) return absl::OkStatus();
    } catch (const std::exception& e) {
      return Errorf(absl::StatusCode::kInternal, "token {}: {}", token, e.what());
    }
    return InvalidArgument("token {} does not fit the grammar", token);
  }

  bool ended() const override { return matcher_.IsTerminated(); }
  bool complete() const override { return matcher_.IsCompleted(); }

 private:
  xgrammar::GrammarMatcher matcher_;
  const int32_t width_;
};

class XGrammar final : public TokenGrammar {
 public:
  XGrammar(xgrammar::CompiledGrammar compiled, int32_t width) : compiled_(std::move(compiled)), width_(width) {}
  std::unique_ptr<TokenMatcher> NewMatcher() const override { return std::make_unique<XMatcher>(compiled_, width_); }
  int32_t width() const override { return width_; }
  size_t num_bytes() const override { return compiled_.MemorySizeBytes(); }

 private:
  const xgrammar::CompiledGrammar compiled_;
  const int32_t width_;
};

// The bytes of a string as an EBNF literal.
std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        out += c;
    }
  }
  return out + "\"";
}

std::string ChoiceGrammar(const std::string& choices) {
  std::string rule = "root ::= ";
  bool first = true;
  for (const auto& choice : nlohmann::json::parse(choices)) {
    rule += (first ? "" : " | ") + Quoted(choice.get<std::string>());
    first = false;
  }
  return rule;
}

class XCompiler final : public GrammarCompiler {
 public:
  // One thread, the caller's, and no cache: GrammarCache has one.
  explicit XCompiler(const Vocabulary& vocabulary)
      : width_(vocabulary.width),
        compiler_(
            xgrammar::TokenizerInfo(vocabulary.tokens, xgrammar::VocabType::RAW, vocabulary.width, vocabulary.end_ids),
            1, false) {}

  absl::StatusOr<std::shared_ptr<const TokenGrammar>> Compile(const GrammarSpec& spec) const override {
    std::string warning;
    compile_warning = &warning;
    const absl::Cleanup forget = [] { compile_warning = nullptr; };
    try {
      auto grammar = std::make_shared<const XGrammar>(CompileOrThrow(spec), width_);
      if (!warning.empty()) return absl::InvalidArgumentError(warning);
      std::vector<uint32_t> first(MaskWords(width_));
      grammar->NewMatcher()->FillMask(first);
      if (std::all_of(first.begin(), first.end(), [](uint32_t word) { return word == 0; }))
        return absl::InvalidArgumentError("no text fits the grammar");
      return grammar;
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError("the grammar takes more memory than there is");
    } catch (const std::exception& e) {
      return absl::InvalidArgumentError(e.what());
    }
  }

 private:
  xgrammar::CompiledGrammar CompileOrThrow(const GrammarSpec& spec) const {
    const auto schema = [&](const std::string& text) {
      return compiler_.CompileJSONSchema(text, true, std::nullopt, std::nullopt, spec.strict, kMaxJsonSpace);
    };
    switch (spec.kind) {
      case GrammarKind::kJsonObject:
        return schema(R"({"type": "object"})");
      case GrammarKind::kJsonSchema:
        return schema(spec.text);
      case GrammarKind::kRegex:
        return compiler_.CompileRegex(spec.text);
      case GrammarKind::kChoice:
        return compiler_.CompileGrammar(ChoiceGrammar(spec.text));
      case GrammarKind::kGrammar:
        return compiler_.CompileGrammar(spec.text);
      case GrammarKind::kStructuralTag:
        return compiler_.CompileStructuralTag(spec.text);
    }
    throw std::runtime_error("unknown kind of grammar");
  }

  const int32_t width_;
  mutable xgrammar::GrammarCompiler compiler_;  // thread-safe without its cache: each call works on its own grammar
};

}  // namespace
}  // namespace spl::grammar

extern "C" __attribute__((visibility("default"))) spl::grammar::GrammarCompiler* splice_xgrammar_make(
    const char* build, const spl::grammar::Vocabulary& vocabulary, absl::Status& error) {
  if (std::strcmp(build, spl::kernels::PluginBuild()) != 0) {
    error = absl::FailedPreconditionError("libsplice_xgrammar.so is of another build than the program");
    return nullptr;
  }
  try {
    return new spl::grammar::XCompiler(vocabulary);
  } catch (const std::exception& e) {
    error = absl::InternalError(e.what());
    return nullptr;
  }
}
