// How the documents of a knowledge base are put into the contexts that they are computed in: a list of the documents of
// each context.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spl::router {

// Each document in a context of its own.
std::vector<std::vector<size_t>> SeparateContexts(size_t num_documents);

// Documents in the order given, one behind the other, as many as fit; the next one opens a new context (next fit). The
// order is kept because neighbours then stay neighbours: a document has seen those that stand before it.
//
// `lengths` are tokens of each document, `prefix` of what stands in front of every context, `limit` of a whole context;
// every prefix + lengths[i] <= limit. Cost: linear.
std::vector<std::vector<size_t>> PackContexts(std::span<const uint64_t> lengths, uint64_t prefix, uint64_t limit);

}  // namespace spl::router
