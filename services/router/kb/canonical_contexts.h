// Groups the documents of a knowledge base into contexts in which they are computed: a list of document indices per
// context.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spl::router {

// Puts each document into a context of its own.
std::vector<std::vector<size_t>> SeparateContexts(size_t num_documents);

// Puts documents one after the other in the given order, as many as fit; the next one opens a new context (next fit).
// The order is kept so that neighbours stay neighbours: a document has seen those before it in its context.
//
// `lengths`: tokens of each document; `prefix`: tokens in front of every context; `limit`: tokens of a whole context.
// REQUIRES: prefix + lengths[i] <= limit for every i. Cost: linear.
std::vector<std::vector<size_t>> PackContexts(std::span<const uint64_t> lengths, uint64_t prefix, uint64_t limit);

}  // namespace spl::router
