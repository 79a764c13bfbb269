// libsplice_xgrammar.so: grammars compiled and matched by xgrammar. Its exceptions and its headers stay in here.
#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/common/plugin.h"
#include "services/base/status.h"
#include "services/grammar/grammar_plugin.h"
#include "services/grammar/token_grammar.h"
#include "services/grammar/work_budget.h"

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

// The bounds of a compile. For 128K tokens most schemas take 0.1 s, and every character of a maxLength 0.05 s more.
constexpr WorkLimits kCompileLimits = {.time = std::chrono::seconds(10), .bytes = size_t{512} << 20};

// The bounds of a token, for its mask and its acceptance each: other answers of the batch wait for it. An answer has
// some time to go beyond the first bound, and none to go beyond the second.
constexpr std::chrono::milliseconds kTokenTime{5};
constexpr std::chrono::milliseconds kSlackTime{250};
constexpr std::chrono::milliseconds kTokenTimeMax{50};
constexpr size_t kTokenBytes = size_t{64} << 20;

// Runs `work` within the limits. ResourceExhausted names the one that it went beyond; InvalidArgument is xgrammar's
// error. `spent`, if given, gets the time taken, 0 where that is at most `exact_above`.
template <class Work>
absl::Status RunBounded(const WorkLimits& limits, const Work& work, std::chrono::nanoseconds* spent = nullptr,
                        std::chrono::nanoseconds exact_above = {}) {
  WorkBudget budget(limits);
  try {
    work();
    budget.End();
    if (spent != nullptr) *spent = budget.Spent(exact_above);
    return absl::OkStatus();
  } catch (const WorkExceeded& e) {
    budget.End();
    return absl::ResourceExhaustedError(e.what());
  } catch (const std::bad_alloc&) {
    budget.End();
    return absl::ResourceExhaustedError("memory");
  } catch (const std::exception& e) {
    budget.End();
    return absl::InvalidArgumentError(e.what());
  }
}

class XMatcher final : public TokenMatcher {
 public:
  XMatcher(const xgrammar::CompiledGrammar& grammar, int32_t width) : width_(width) {
    (void)Bounded([&] { matcher_.emplace(grammar); });
  }

  absl::Status FillMask(std::span<uint32_t> mask) override {
    std::array<int64_t, 1> shape = {static_cast<int64_t>(mask.size())};
    DLTensor tensor = {};
    tensor.data = mask.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = xgrammar::GetBitmaskDLType();
    tensor.shape = shape.data();
    return Bounded([&] {
      // False: every token may come, and the mask need not have been written.
      if (!matcher_->FillNextTokenBitmask(&tensor)) std::memset(mask.data(), 0xff, mask.size_bytes());
    });
  }

  absl::Status Accept(int32_t token) override {
    if (token < 0 || token >= width_) return InvalidArgument("token {} is outside the vocabulary of {}", token, width_);
    bool accepted = false;
    SPLICE_RETURN_IF_ERROR(Bounded([&] { accepted = !matcher_->IsTerminated() && matcher_->AcceptToken(token); }));
    return accepted ? absl::OkStatus() : InvalidArgument("token {} does not fit the grammar", token);
  }

  bool ended() const override { return error_.ok() && matcher_->IsTerminated(); }
  bool complete() const override { return error_.ok() && matcher_->IsCompleted(); }

 private:
  // The matcher is of no use after an error of `work`: it may be half changed.
  template <class Work>
  absl::Status Bounded(const Work& work) {
    if (!error_.ok()) return error_;
    const std::chrono::nanoseconds limit = std::min<std::chrono::nanoseconds>(kTokenTimeMax, kTokenTime + slack_);
    std::chrono::nanoseconds spent{};
    error_ = RunBounded({limit, kTokenBytes}, work, &spent, kTokenTime);
    if (absl::IsResourceExhausted(error_))
      error_ =
          Errorf(absl::StatusCode::kResourceExhausted,
                 "the grammar needs more {} at a token than there is ({} ms, {} ms in all beyond {}): make it simpler",
                 MessageOf(error_), kTokenTimeMax.count(), kSlackTime.count(), kTokenTime.count());
    if (absl::IsInvalidArgument(error_)) error_ = absl::InternalError(error_.message());
    if (spent > kTokenTime) slack_ -= std::min<std::chrono::nanoseconds>(slack_, spent - kTokenTime);
    return error_;
  }

  std::optional<xgrammar::GrammarMatcher> matcher_;  // there unless error_ says otherwise
  const int32_t width_;
  std::chrono::nanoseconds slack_ = kSlackTime;
  absl::Status error_;
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
    std::optional<xgrammar::CompiledGrammar> compiled;
    compile_warning = &warning;
    const absl::Status status = RunBounded(kCompileLimits, [&] { compiled = CompileOrThrow(spec); });
    compile_warning = nullptr;
    if (absl::IsResourceExhausted(status))
      return InvalidArgument("takes more {} to compile than there is ({} s, {} MiB): make it smaller, or repeat less",
                             MessageOf(status), kCompileLimits.time / std::chrono::seconds(1),
                             kCompileLimits.bytes >> 20);
    if (!status.ok()) return status;
    if (!warning.empty()) return absl::InvalidArgumentError(warning);
    const auto grammar = std::make_shared<const XGrammar>(*std::move(compiled), width_);
    SPLICE_RETURN_IF_ERROR(CheckBegins(*grammar));
    return grammar;
  }

 private:
  static absl::Status CheckBegins(const TokenGrammar& grammar) {
    std::vector<uint32_t> first(MaskWords(grammar.width()));
    if (const absl::Status filled = grammar.NewMatcher()->FillMask(first); !filled.ok())
      return absl::InvalidArgumentError(filled.message());
    if (std::all_of(first.begin(), first.end(), [](uint32_t word) { return word == 0; }))
      return absl::InvalidArgumentError("no text fits the grammar");
    return absl::OkStatus();
  }

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
