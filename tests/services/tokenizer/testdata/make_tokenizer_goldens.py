#!/usr/bin/env python3
"""Trains small tokenizers in the forms of the supported families and writes what the tokenizers library does with them.

    pip install tokenizers; python3 make_tokenizer_goldens.py

For each form: tokenizers/NAME.json and lines of tokenizers.jsonl.
"""
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CORPUS = ["The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?",
          "def main():\n    return [x for x in range(100) if x % 2 == 0]\n",
          "Größe, café, naïve; 日本語の文章です。Привет, мир! 🙂🙃 ñandú",
          "tokens token tokenizer tokenization tokenize tokenized the there then them these those",
          "    indented\n\n\tlines\r\nwith all kinds of   space  "] * 20
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["", " ", "  ", "a", "Hello world", " Hello  world ", "the token tokenizer's THE'S isn'T", "It's 1234567 ½ ⅷ ٣",
         "line\nline\r\n\r\n  \tx\n \n", "日本語 Привет café cafe\u0301 e\u0323\u0301 한국어 \u1112\u1161\u11ab 🙂👩‍👩‍👧",
         "<s>hi</s> <|im_start|>user\nx<|im_end|>\n", "a<s>b </s> c", "<tool> x <tool>y", "word <mask> word<mask>", "fooBARbaz HTMLParser ABCdef",
         "x_y-z/w\\v (paren) [brack] {curly} \"quote\" #tag @at a+b=c", "\u00a0nbsp\u2003em\u180emvs\u3000ideo\u0085nel", "\u017f\u212a'\u017f",
         "ſ's ’s", "▁under ▁▁ x▁y", "<0x41><0xFF>", "\u0000\u0001\u001f\u007f\ufeff\ufffd", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
         "thethethethethethethetokentokentokentokenthethethethethethethethethethethe", "SINGLE single singles asingle single", " lead<sp>  trail <sp>x",
         "\u212b \u2126 \ufb01 \u0958 \u0344", "12 34  567\n89", "...!!!???", " \u2028 \u2029 ", "don't DON'T we'll We'Ve I'm i'D 'tis"]


def byte_level(pattern, normalizer=None, ignore_merges=False, bos=None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, 420, alphabet=pre_tokenizers.ByteLevel.alphabet())
    if bos:
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single=f"{bos} $A </s>", special_tokens=[(bos, tokenizer.token_to_id(bos)), ("</s>", tokenizer.token_to_id("</s>"))])])
    return tokenizer


def train(tokenizer, vocab_size, alphabet=(), specials=()):
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(specials), initial_alphabet=list(alphabet), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])


def sentencepiece(metaspace):
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=620, special_tokens=["<unk>", "<s>", "</s>"] + byte_tokens, show_progress=False)
    words.train_from_iterator([c for c in CORPUS if "日" not in c], trainer)
    model = json.loads(words.to_str())["model"]
    whole = json.loads(tokenizer.to_str())
    whole["model"].update(vocab=model["vocab"], merges=model["merges"])
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def gpt2():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, 400, alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True), AddedToken("<mask>", rstrip=True, normalized=False),
                          AddedToken("single", single_word=True), AddedToken("<sp>", lstrip=True, rstrip=True, normalized=False)])
    return tokenizer


def digits():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(), normalizers.NFC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("\n", "removed"), pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True), pre_tokenizers.Digits(individual_digits=False)])
    train(tokenizer, 380, alphabet=pre_tokenizers.ByteLevel.alphabet())
    return tokenizer  # no decoder: tokens are joined with spaces


def splits(behavior, invert):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[aeiou]+|\s"), behavior, invert)
    train(tokenizer, 300, specials=["<unk>"])
    return tokenizer


def drop_merges_form(text):
    """The older spelling: merges as "a b"."""
    document = json.loads(text)
    document["model"]["merges"] = [" ".join(m) for m in document["model"]["merges"]]
    return json.dumps(document, ensure_ascii=False)


FORMS = {
    "llama3": byte_level(LLAMA3, ignore_merges=True, bos="<s>"), "qwen": byte_level(QWEN, normalizers.NFC()),
    "tekken": byte_level(TEKKEN, ignore_merges=False, bos="<s>"), "sentencepiece": sentencepiece(False), "metaspace": sentencepiece(True),
    "gpt2": gpt2(), "digits": digits(), "split_previous": splits("merged_with_previous", False), "split_next": splits("merged_with_next", False),
    "split_contiguous": splits("contiguous", False), "split_removed_invert": splits("removed", True), "split_isolated": splits("isolated", False),
}


def main():
    rng = random.Random(7)
    (HERE / "tokenizers").mkdir(exist_ok=True)
    with open(HERE / "tokenizers.jsonl", "w") as out:
        for name, tokenizer in FORMS.items():
            text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)
            text = drop_merges_form(text) if name in ("qwen", "gpt2", "metaspace") else text
            (HERE / "tokenizers" / f"{name}.json").write_text(text)
            tokenizer = Tokenizer.from_str(text)
            for line in TEXTS:
                plain = Tokenizer.from_str(text)
                plain.encode_special_tokens = True
                ids = tokenizer.encode(line, add_special_tokens=False).ids
                out.write(json.dumps({"form": name, "text": line, "ids": ids, "ids_added": tokenizer.encode(line).ids,
                                      "ids_plain": plain.encode(line, add_special_tokens=False).ids,
                                      "decoded": tokenizer.decode(ids, skip_special_tokens=False)}) + "\n")
            size = tokenizer.get_vocab_size()
            known = [i for i in range(size) if tokenizer.id_to_token(i)]
            for _ in range(20):
                ids = [rng.choice(known) for _ in range(rng.randrange(12))]
                out.write(json.dumps({"form": name, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                                      "skipped": tokenizer.decode(ids)}) + "\n")


if __name__ == "__main__":
    main()
