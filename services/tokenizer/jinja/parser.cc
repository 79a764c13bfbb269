#include "services/tokenizer/jinja/parser.h"

#include <algorithm>
#include <set>
#include <utility>

#include "services/base/status.h"
#include "services/tokenizer/jinja/builtins.h"
#include "services/tokenizer/jinja/expression_parser.h"
#include "services/tokenizer/jinja/lexer.h"
#include "services/tokenizer/jinja/token_stream.h"

namespace spl::tokenizer::jinja {
namespace {

constexpr int kNestingMax = 40;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : stream_(std::move(tokens)), expressions_(&stream_) {}

  absl::StatusOr<Block> Run() {
    SPLICE_ASSIGN_OR_RETURN(Block block, ParseBlock({}));
    if (!stream_.Is(TokenKind::kEnd)) return stream_.Error("a tag that closes nothing");
    for (const auto& called : expressions_.called_names()) {
      if (IsFunction(called.name) || assigned_.contains(called.name)) continue;
      return InvalidArgument("line {}: the function '{}' is not supported", called.line, called.name);
    }
    return block;
  }

 private:
  bool AtTag(std::string_view name) const {
    return stream_.Is(TokenKind::kTagBegin) && stream_.next().kind == TokenKind::kName && stream_.next().text == name;
  }
  absl::Status EndTag() {
    if (!stream_.Is(TokenKind::kTagEnd)) return stream_.Unexpected("'%}'");
    stream_.Skip();
    return absl::OkStatus();
  }
  // Parses "{% name %}", which ends a block.
  absl::Status Close(std::string_view name) {
    if (!AtTag(name)) return stream_.Unexpected("{% " + std::string(name) + " %}");
    stream_.Skip();
    stream_.Skip();
    if (name == "endmacro" && stream_.Is(TokenKind::kName)) stream_.Skip();
    return EndTag();
  }

  // Parses nodes up to a tag of `ends`, which is not consumed, or the end of the template.
  absl::StatusOr<Block> ParseBlock(const std::vector<std::string_view>& ends) {
    if (nesting_ >= kNestingMax) return stream_.Error("tags are nested too deep");
    ++nesting_;
    Block block;
    while (!stream_.Is(TokenKind::kEnd)) {
      if (std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return AtTag(end); })) break;
      SPLICE_ASSIGN_OR_RETURN(Node node, ParseNode());
      block.push_back(std::move(node));
    }
    --nesting_;
    return block;
  }

  absl::StatusOr<Node> ParseNode() {
    Node node;
    node.line = stream_.current().line;
    if (stream_.Is(TokenKind::kData)) {
      node.text = stream_.current().text;
      stream_.Skip();
      return node;
    }
    if (stream_.Is(TokenKind::kPrintBegin)) {
      stream_.Skip();
      node.kind = NodeKind::kPrint;
      SPLICE_ASSIGN_OR_RETURN(node.expr, expressions_.ParseTuple(true));
      if (!stream_.Is(TokenKind::kPrintEnd)) return stream_.Unexpected("'}}'");
      stream_.Skip();
      return node;
    }
    stream_.Skip();
    SPLICE_ASSIGN_OR_RETURN(const std::string tag, stream_.ExpectName());
    SPLICE_RETURN_IF_ERROR(ParseTag(tag, &node));
    return node;
  }

  absl::Status ParseTag(const std::string& tag, Node* node) {
    if (tag == "if") return ParseIf(node);
    if (tag == "for") return ParseFor(node);
    if (tag == "set") return ParseSet(node);
    if (tag == "macro") return ParseMacro(node);
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) return stream_.Error("'" + tag + "' outside of a loop");
      node->kind = tag == "break" ? NodeKind::kBreak : NodeKind::kContinue;
      return EndTag();
    }
    if (tag == "generation") {  // marks the model's text for training; it prints its body
      node->kind = NodeKind::kScope;
      SPLICE_RETURN_IF_ERROR(EndTag());
      SPLICE_ASSIGN_OR_RETURN(node->body, ParseBody({"endgeneration"}));
      return Close("endgeneration");
    }
    if (tag.starts_with("end") || tag == "else" || tag == "elif") return stream_.Error("'" + tag + "' closes nothing");
    return stream_.Error("the tag '" + tag + "' is not supported");
  }

  // Parses a body in which break and continue cannot reach the loop outside.
  absl::StatusOr<Block> ParseBody(const std::vector<std::string_view>& ends) {
    const int loops = std::exchange(loops_, 0);
    absl::StatusOr<Block> block = ParseBlock(ends);
    loops_ = loops;
    return block;
  }

  absl::Status ParseIf(Node* node) {
    node->kind = NodeKind::kIf;
    do {
      SPLICE_ASSIGN_OR_RETURN(ExprPtr condition, expressions_.ParseTuple(false));
      SPLICE_RETURN_IF_ERROR(EndTag());
      SPLICE_ASSIGN_OR_RETURN(Block body, ParseBlock({"elif", "else", "endif"}));
      node->branches.emplace_back(std::move(condition), std::move(body));
    } while (TakeTag("elif"));
    if (TakeTag("else")) {
      SPLICE_RETURN_IF_ERROR(EndTag());
      SPLICE_ASSIGN_OR_RETURN(node->else_body, ParseBlock({"endif"}));
    }
    return Close("endif");
  }

  bool TakeTag(std::string_view name) {
    if (!AtTag(name)) return false;
    stream_.Skip();
    stream_.Skip();
    return true;
  }

  // Parses one name or several separated by commas, with or without parentheses.
  absl::Status ParseTargets(std::vector<Target>* targets, bool allow_attribute) {
    const bool in_parentheses = stream_.TakeOperator("(");
    do {
      if (!targets->empty() && !stream_.Is(TokenKind::kName)) break;  // a comma at the end
      Target target;
      SPLICE_ASSIGN_OR_RETURN(target.name, stream_.ExpectName());
      for (const std::string_view reserved : {"true", "True", "false", "False", "none", "None", "loop"}) {
        if (target.name == reserved) return stream_.Error("'" + target.name + "' cannot be assigned to");
      }
      if (allow_attribute && stream_.TakeOperator(".")) {
        SPLICE_ASSIGN_OR_RETURN(target.attribute, stream_.ExpectName());
      } else {
        assigned_.insert(target.name);
      }
      targets->push_back(std::move(target));
    } while (stream_.TakeOperator(","));
    return in_parentheses ? stream_.Expect(")") : absl::OkStatus();
  }

  absl::Status ParseFor(Node* node) {
    node->kind = NodeKind::kFor;
    SPLICE_RETURN_IF_ERROR(ParseTargets(&node->targets, /*allow_attribute=*/false));
    if (!stream_.TakeName("in")) return stream_.Unexpected("'in'");
    SPLICE_ASSIGN_OR_RETURN(node->expr, expressions_.ParseTuple(false));
    if (stream_.TakeName("if")) {
      SPLICE_ASSIGN_OR_RETURN(node->condition, expressions_.Parse());
    }
    if (stream_.IsName("recursive")) return stream_.Error("recursive loops are not supported");
    SPLICE_RETURN_IF_ERROR(EndTag());
    ++loops_;
    absl::StatusOr<Block> body = ParseBlock({"else", "endfor"});
    --loops_;
    if (!body.ok()) return body.status();
    node->body = *std::move(body);
    if (TakeTag("else")) {
      SPLICE_RETURN_IF_ERROR(EndTag());
      SPLICE_ASSIGN_OR_RETURN(node->else_body, ParseBlock({"endfor"}));
    }
    return Close("endfor");
  }

  absl::Status ParseSet(Node* node) {
    SPLICE_RETURN_IF_ERROR(ParseTargets(&node->targets, /*allow_attribute=*/true));
    if (stream_.TakeOperator("=")) {
      node->kind = NodeKind::kSet;
      SPLICE_ASSIGN_OR_RETURN(node->expr, expressions_.ParseTuple(true));
      return EndTag();
    }
    node->kind = NodeKind::kSetBlock;
    if (node->targets.size() != 1) return stream_.Unexpected("'='");
    auto body = std::make_unique<Expr>();
    body->kind = ExprKind::kName;
    body->line = node->line;
    SPLICE_ASSIGN_OR_RETURN(node->expr, expressions_.ParseFilters(std::move(body)));
    SPLICE_RETURN_IF_ERROR(EndTag());
    SPLICE_ASSIGN_OR_RETURN(node->body, ParseBody({"endset"}));
    return Close("endset");
  }

  absl::Status ParseMacro(Node* node) {
    node->kind = NodeKind::kMacro;
    SPLICE_ASSIGN_OR_RETURN(node->text, stream_.ExpectName());
    assigned_.insert(node->text);
    SPLICE_RETURN_IF_ERROR(stream_.Expect("("));
    while (!stream_.TakeOperator(")")) {
      if (!node->targets.empty()) SPLICE_RETURN_IF_ERROR(stream_.Expect(","));
      Target parameter;
      SPLICE_ASSIGN_OR_RETURN(parameter.name, stream_.ExpectName());
      assigned_.insert(parameter.name);
      ExprPtr fallback;
      if (stream_.TakeOperator("=")) {
        SPLICE_ASSIGN_OR_RETURN(fallback, expressions_.Parse());
      }
      node->targets.push_back(std::move(parameter));
      node->defaults.push_back(std::move(fallback));
    }
    SPLICE_RETURN_IF_ERROR(EndTag());
    SPLICE_ASSIGN_OR_RETURN(node->body, ParseBody({"endmacro"}));
    return Close("endmacro");
  }

  TokenStream stream_;
  ExpressionParser expressions_;
  std::set<std::string> assigned_;  // names that the template itself defines somewhere
  int nesting_ = 0;
  int loops_ = 0;  // loops that break and continue can reach
};

}  // namespace

absl::StatusOr<Block> ParseTemplate(std::string_view source) {
  SPLICE_ASSIGN_OR_RETURN(std::vector<Token> tokens, Tokenize(source));
  return Parser(std::move(tokens)).Run();
}

}  // namespace spl::tokenizer::jinja
