#include "services/tokenizer/bpe.h"

#include <limits>
#include <queue>
#include <utility>

#include "services/base/status.h"
#include "services/text/utf8.h"
#include "services/tokenizer/byte_level.h"

namespace spl::tokenizer {
namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
// Up to about this many symbols, scanning an array is faster than a heap. Nearly every word is shorter.
constexpr size_t kShortSymbols = 48;

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

}  // namespace

std::optional<TokenId> Bpe::Find(const TextMap& map, std::string_view text) {
  const auto it = map.find(View(text));
  if (it == map.end()) return std::nullopt;
  return it->second;
}

std::optional<TokenId> Bpe::IdOf(std::string_view token) const { return Find(ids_, token); }

std::string_view Bpe::PieceOf(TokenId id) const { return Has(id) ? std::string_view(pieces_[id]) : std::string_view(); }

bool Bpe::Has(TokenId id) const { return id >= 0 && id < static_cast<TokenId>(has_.size()) && has_[id]; }

const Bpe::Merge* Bpe::FindMerge(TokenId left, TokenId right) const {
  const auto it = merges_.find(PairKey(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void Bpe::Encode(std::string_view piece, std::vector<TokenId>* out) const {
  if (piece.empty()) return;
  if (const std::optional<TokenId> id = Find(direct_, piece)) {
    out->push_back(*id);
    return;
  }
  EncodeByMerges(piece, out);
}

void Bpe::EncodeByMerges(std::string_view piece, std::vector<TokenId>* out) const {
  std::vector<TokenId> symbols;
  symbols.reserve(piece.size());
  if (!byte_level_) {
    SpellChars(piece, &symbols);
  } else if (!SpellBytes(piece, &symbols)) {
    SpellChars(BytesToChars(piece), &symbols);
  }
  if (symbols.size() <= kShortSymbols) {
    MergeShort(&symbols);
  } else {
    MergeLong(&symbols);
  }
  out->insert(out->end(), symbols.begin(), symbols.end());
}

bool Bpe::SpellBytes(std::string_view piece, std::vector<TokenId>* symbols) const {
  for (const char byte : piece) {
    const TokenId id = id_of_byte_[static_cast<uint8_t>(byte)];
    if (id < 0) {
      symbols->clear();
      return false;
    }
    symbols->push_back(id);
  }
  return true;
}

bool Bpe::SpellByFallback(std::string_view character, std::vector<TokenId>* symbols) const {
  if (!byte_fallback_) return false;
  for (const char byte : character) {
    if (fallback_of_byte_[static_cast<uint8_t>(byte)] < 0) return false;
  }
  for (const char byte : character) symbols->push_back(fallback_of_byte_[static_cast<uint8_t>(byte)]);
  return true;
}

// Holds an unknown token until the next known character, so that with fuse_unk a run of them becomes one. Bytes of the
// fallback do not flush it, as in the reference.
void Bpe::SpellChars(std::string_view text, std::vector<TokenId>* symbols) const {
  bool unk_pending = false;
  for (size_t pos = 0; pos < text.size();) {
    const std::string_view character = text.substr(pos, text::DecodeUtf8(text, pos).num_bytes);
    pos += character.size();
    if (const std::optional<TokenId> id = Find(ids_, character)) {
      if (unk_pending) symbols->push_back(unk_id_);
      unk_pending = false;
      symbols->push_back(*id);
    } else if (!SpellByFallback(character, symbols) && unk_id_ >= 0) {
      if (unk_pending && !fuse_unk_) symbols->push_back(unk_id_);
      unk_pending = true;
    }
  }
  if (unk_pending) symbols->push_back(unk_id_);
}

void Bpe::MergeShort(std::vector<TokenId>* symbols) const {
  std::array<int32_t, kShortSymbols> ranks;  // ranks[i]: of the pair (i, i + 1)
  std::array<TokenId, kShortSymbols> merged;
  std::vector<TokenId>& ids = *symbols;
  size_t n = ids.size();
  const auto look_up = [&](size_t i) {
    const Merge* merge = FindMerge(ids[i], ids[i + 1]);
    ranks[i] = merge != nullptr ? merge->rank : kNoRank;
    merged[i] = merge != nullptr ? merge->merged : 0;
  };
  for (size_t i = 0; i + 1 < n; ++i) look_up(i);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    ids[best] = merged[best];
    for (size_t i = best + 1; i + 1 < n; ++i) {
      ids[i] = ids[i + 1];
      ranks[i] = ranks[i + 1];
      merged[i] = merged[i + 1];
    }
    --n;
    if (best > 0) look_up(best - 1);
    if (best + 1 < n) look_up(best);
  }
  ids.resize(n);
}

void Bpe::MergeLong(std::vector<TokenId>* symbols) const {
  struct Node {
    TokenId id;
    int32_t previous;
    int32_t next;  // -1: the last one
  };
  struct Candidate {
    int32_t rank;
    int32_t left;  // node
    TokenId left_id;
    TokenId right_id;
    TokenId merged;
    bool operator>(const Candidate& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }
  };
  const auto num_symbols = static_cast<int32_t>(symbols->size());
  std::vector<Node> nodes(num_symbols);
  for (int32_t i = 0; i < num_symbols; ++i) nodes[i] = {(*symbols)[i], i - 1, i + 1 < num_symbols ? i + 1 : -1};
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto offer = [&](int32_t left) {
    if (left < 0 || nodes[left].next < 0) return;
    const TokenId left_id = nodes[left].id;
    const TokenId right_id = nodes[nodes[left].next].id;
    if (const Merge* merge = FindMerge(left_id, right_id)) {
      queue.push({merge->rank, left, left_id, right_id, merge->merged});
    }
  };
  for (int32_t i = 0; i + 1 < num_symbols; ++i) offer(i);
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Node& left = nodes[top.left];
    // Stale if one of the two was merged meanwhile (a node that was the right part has id -1).
    if (left.id != top.left_id || left.next < 0 || nodes[left.next].id != top.right_id) continue;
    Node& right = nodes[left.next];
    left.id = top.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) nodes[left.next].previous = top.left;
    offer(left.previous);
    offer(top.left);
  }
  symbols->clear();
  for (int32_t i = 0; i >= 0; i = nodes[i].next) symbols->push_back(nodes[i].id);
}

}  // namespace spl::tokenizer
