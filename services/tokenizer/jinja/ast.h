// The tree of a parsed template: the parser builds it, the evaluator reads it.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "services/tokenizer/jinja/value.h"

namespace spl::tokenizer::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

enum class ExprKind {
  kConstant,     // value
  kName,         // text
  kList,         // args
  kTuple,        // args
  kDict,         // args: key, value, key, value, …
  kAttribute,    // args[0] . text
  kSubscript,    // args[0] [ args[1] ]
  kSlice,        // args[0] [ args[1] : args[2] : args[3] ]; absent parts are null
  kCall,         // text ( args[0]…, named ): a global function, macro or variable
  kMethod,       // args[0] . text ( args[1]…, named )
  kFilter,       // args[0] | text ( args[1]…, named )
  kTest,         // args[0] is text ( args[1]… )
  kNot,          // args[0]
  kNegate,       // args[0]
  kPlus,         // args[0]
  kBinary,       // args[0] text args[1]; text is + - * / // % **
  kConcat,       // args joined
  kCompare,      // args[0] operators[0] args[1] operators[1] args[2] …
  kAnd,          // args[0], args[1]
  kOr,           // args[0], args[1]
  kConditional,  // args[0] if args[1] else args[2]; args[2] may be null
};

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  int line = 0;
  int depth = 1;  // depth of this tree
  std::string text;
  Value value;
  std::vector<ExprPtr> args;
  std::vector<std::pair<std::string, ExprPtr>> named;
  std::vector<std::string> operators;
};

struct Node;
using Block = std::vector<Node>;

enum class NodeKind { kData, kPrint, kIf, kFor, kSet, kSetBlock, kMacro, kBreak, kContinue, kScope };

// Target of an assignment: a name, or an attribute of a namespace.
struct Target {
  std::string name;
  std::string attribute;  // empty: the name itself
};

struct Node {
  NodeKind kind = NodeKind::kData;
  int line = 0;
  std::string text;   // kData; the name of a macro
  ExprPtr expr;       // kPrint, kSet; the iterable of kFor; the filtered body of kSetBlock (kName "" is the body)
  ExprPtr condition;  // kFor: filter of the items; null: all
  std::vector<Target> targets;                      // kSet, kSetBlock, kFor; parameters of a macro
  std::vector<ExprPtr> defaults;                    // kMacro: defaults of the parameters; null: none
  std::vector<std::pair<ExprPtr, Block>> branches;  // kIf: condition and body
  Block body;                                       // kFor, kSetBlock, kMacro, kScope
  Block else_body;                                  // kIf, kFor
};

}  // namespace spl::tokenizer::jinja
