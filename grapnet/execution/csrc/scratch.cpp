// Memory that a thread keeps for its next call: the page faults of fresh memory would cost more than the kernels.
#include <cstdlib>
#include <new>

#include "kernels.h"

namespace grapnet {
namespace {

constexpr std::size_t unit = std::size_t(1) << 18;   // sizes are multiples of it
constexpr std::size_t keep = std::size_t(64) << 20;  // a larger buffer goes back before the next one is taken

struct Buffer {
    void* data = nullptr;
    std::size_t size = 0;

    ~Buffer() { std::free(data); }

    void renew(std::size_t bytes) {
        std::free(data);
        size = 0;
        data = std::aligned_alloc(64, bytes);
        if (data == nullptr) throw std::bad_alloc();
        size = bytes;
    }
};

}  // namespace

void* scratch(std::size_t bytes) {
    thread_local Buffer buffer;
    if (bytes > buffer.size || buffer.size > keep) buffer.renew((bytes / unit + 1) * unit);
    return buffer.data;
}

}  // namespace grapnet
