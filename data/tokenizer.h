// Tokenizers. One file format for all of them: Hugging Face's tokenizer.json (a byte-level vocabulary), so
// that a checkpoint folder carries a tokenizer that other programs load too.
#pragma once

#include <string>
#include <string_view>
#include <vector>

struct Tokenizer {
    std::vector<std::string> bytes;  // the bytes of each id; "" where an id has none
    int end_of_text = -1;            // id of "<|endoftext|>", or -1
    // Why this program cannot encode with it; "" where each byte is its own token.
    std::string obstacle = "has no vocabulary";

    size_t vocab_size() const { return bytes.size(); }
};

// The byte tokenizer: ids 0-255 are the bytes, 256 is the end of a text.
Tokenizer byte_tokenizer();

// Writes a byte tokenizer as tokenizer.json: byte-level BPE with no merges, GPT-2's byte alphabet. There too
// "<|endoftext|>" is a special token: other programs make it from text unless told not to. Fails as
// file_write does, and for a vocabulary that cannot encode.
void tokenizer_write(const std::string& path, const Tokenizer& tokenizer);

// Reads a tokenizer.json with a byte-level vocabulary, merges or not (GPT-2's, for decoding). Fails, naming
// the flag (may be "") and the path, on anything else.
Tokenizer tokenizer_read(const std::string& path, const std::string& flag);

// Text to ids. Special tokens are never made from text: "<|endoftext|>" in a corpus stays text.
// Fails where there is an obstacle, a vocabulary with merges for instance.
std::vector<int> encode(const Tokenizer& tokenizer, std::string_view text);

// Ids to bytes; the end-of-text token gives "<|endoftext|>". An id without bytes gives "[id]".
std::string decode(const Tokenizer& tokenizer, const std::vector<int>& ids);

// Makes bytes fit for a terminal: valid UTF-8, newline and tab pass, every other control character and
// invalid byte becomes U+FFFD. Incomplete UTF-8 at the end is kept in `pending` for the next call; if none
// follows, pending.size() bytes of the text were cut.
std::string printable(std::string_view bytes, std::string& pending);

// The same for a whole text that has to stay on one line: newline and tab become U+FFFD too.
std::string printable_line(std::string_view bytes);
