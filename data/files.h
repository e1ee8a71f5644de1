// Whole files: mapped for reading, replaced in one step for writing.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// A read-only mapping of a whole file; the last copy to go unmaps it. The file may be renamed, replaced or
// removed meanwhile, but not shortened: reading a page that is gone ends the process (SIGBUS).
struct MappedFile {
    std::shared_ptr<const char> data;  // null for an empty file
    size_t bytes = 0;

    std::string_view text() const { return {data.get(), bytes}; }
};

// Maps a regular file of any size. Fails, naming the flag (may be "") and the path, on anything else.
MappedFile file_map(const std::string& path, const std::string& flag);

// Replaces the file by the concatenated parts: written to path.tmp, synced, renamed, the folder synced. A
// crash leaves the old file or the new one, never half of one. Fails with path and reason (a full disk, ...)
// and then leaves no path.tmp behind.
void file_write(const std::string& path, const std::vector<std::string_view>& parts);
