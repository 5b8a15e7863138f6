// Read bandwidth of shuffled pages: reads keys and values of one sequence on all threads and computes nothing. It is
// the upper bound of few_rows.h, and the reason for the prefetch into L2 (fetch.h) and for reading four pages of a block
// interleaved (blocks.h).
//
//     c++ -O3 -march=native -fopenmp bench/read_pages.cpp -o read_pages && ./read_pages [KV heads] [rounds]
//
// 4096 tokens in pages of 16; a head's rows are 4 KiB of each page. All ways take turns over copies; 32 MiB of other
// memory are read before each. Prints medians in ms. "In order" reads the same number of contiguous bytes;
// "interleaved" reads a head's rows of four pages in turn.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

namespace {

constexpr size_t kPiece = 4096, kRow = 256, kLine = 64, kStreams = 4, kPages = 256, kCopies = 8, kSwept = 32 << 20;
typedef uint64_t Vector __attribute__((vector_size(kLine)));
typedef std::vector<const char*> Pieces;

volatile uint64_t sink;

char* huge_pages(size_t bytes) {
  constexpr size_t kHuge = 2 << 20;
  bytes = (bytes + kHuge - 1) / kHuge * kHuge;
  char* memory = static_cast<char*>(std::aligned_alloc(kHuge, bytes));
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  return memory;
}

// CACHE: prefetch into L1 (1), into L2 (2) or not (0), `ahead` pieces ahead. STREAMS: interleaved pieces.
template <int CACHE, size_t STREAMS>
void read(const Pieces& pieces, size_t ahead) {
  constexpr size_t kStep = STREAMS == 1 ? kPiece : kRow;
  Vector sum{};
  for (size_t i = 0; i < pieces.size(); i += STREAMS) {
    for (size_t at = 0; at < kPiece; at += kStep) {
      for (size_t stream = i; stream < i + STREAMS; ++stream) {
        const char *now = pieces[stream] + at, *next = pieces[std::min(stream + ahead, pieces.size() - 1)] + at;
        for (size_t line = 0; line < kStep; line += kLine) {
          if (CACHE == 1) __builtin_prefetch(next + line, 0, 3);
          if (CACHE == 2) __builtin_prefetch(next + line, 0, 2);
          sum ^= *reinterpret_cast<const Vector*>(now + line);
        }
      }
    }
  }
  sink = sum[0];
}

enum class Order { kOfAddresses, kPages, kHeads };

struct Way {
  const char* name;
  void (*read)(const Pieces&, size_t);
  size_t ahead;
  Order order;
  std::vector<double> ms = {};
};

// Each thread's pieces: per block of four pages keys, then values, page by page or head by head.
std::vector<Pieces> shuffled(const char* keys, const char* values, const uint32_t* pages, size_t heads, size_t threads,
                             Order order) {
  std::vector<Pieces> all(threads);
  for (size_t t = 0; t < threads; ++t) {
    const size_t first = heads * t / threads, count = heads * (t + 1) / threads - first;
    for (size_t block = 0; block < kPages; block += kStreams)
      for (const char* pool : {keys, values})
        for (size_t i = 0; i < kStreams * count; ++i) {
          const size_t page = block + (order == Order::kPages ? i / count : i % kStreams);
          const size_t head = first + (order == Order::kPages ? i % count : i / kStreams);
          all[t].push_back(pool + (pages[page] * heads + head) * kPiece);
        }
  }
  return all;
}

std::vector<Pieces> in_order(const char* memory, size_t heads, size_t threads) {
  std::vector<Pieces> all(threads);
  const size_t count = 2 * kPages * heads;
  for (size_t t = 0; t < threads; ++t)
    for (size_t i = count * t / threads; i < count * (t + 1) / threads; ++i) all[t].push_back(memory + i * kPiece);
  return all;
}

double milliseconds(const std::function<void(size_t)>& each_thread, size_t threads) {
  const auto begin = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads)
  each_thread(static_cast<size_t>(omp_get_thread_num()));
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main(int count, char** arguments) {
  const size_t heads = count > 1 ? std::strtoul(arguments[1], nullptr, 10) : 8;
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 50;
  const size_t threads = static_cast<size_t>(omp_get_max_threads()), pool = kCopies * kPages * heads * kPiece;
  const char *keys = huge_pages(pool), *values = huge_pages(pool), *straight = huge_pages(2 * pool);
  const Pieces swept{huge_pages(kSwept)};
  std::vector<uint32_t> pages(kCopies * kPages);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<uint32_t>(i);
  std::mt19937 random(0);
  std::shuffle(pages.begin(), pages.end(), random);
  std::vector<std::vector<Pieces>> places[3];
  for (size_t i = 0; i < kCopies; ++i) {
    places[0].push_back(in_order(straight + i * 2 * kPages * heads * kPiece, heads, threads));
    for (Order order : {Order::kPages, Order::kHeads})
      places[static_cast<size_t>(order)].push_back(shuffled(keys, values, &pages[i * kPages], heads, threads, order));
  }
  std::vector<Way> ways = {
      {"in order", read<0, 1>, 0, Order::kOfAddresses},
      {"in order, prefetched into L2", read<2, 1>, 4, Order::kOfAddresses},
      {"shuffled", read<0, 1>, 0, Order::kPages},
      {"shuffled, prefetched into L1, 1 piece ahead", read<1, 1>, 1, Order::kPages},
      {"shuffled, prefetched into L2, 1 piece ahead", read<2, 1>, 1, Order::kPages},
      {"shuffled, prefetched into L2, 4 pieces ahead", read<2, 1>, 4, Order::kPages},
      {"shuffled, prefetched into L2, 16 pieces ahead", read<2, 1>, 16, Order::kPages},
      {"shuffled, interleaved", read<0, kStreams>, 0, Order::kHeads},
      {"shuffled, interleaved, prefetched into L2, 4 pieces ahead", read<2, kStreams>, 4, Order::kHeads},
      {"shuffled, interleaved, prefetched into L2, 16 pieces ahead", read<2, kStreams>, 16, Order::kHeads}};
  std::vector<Way*> turns;
  for (Way& way : ways) turns.push_back(&way);
  size_t copy = 0;
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(turns.begin(), turns.end(), random);
    for (Way* way : turns) {
      copy = (copy + 1) % kCopies;
      milliseconds(
          [&](size_t t) {
            uint64_t sum = 0;
            for (size_t i = kSwept * t / threads; i < kSwept * (t + 1) / threads; i += kLine) sum += swept[0][i];
            sink = sum;
          },
          threads);
      const std::vector<Pieces>& pieces = places[static_cast<size_t>(way->order)][copy];
      way->ms.push_back(milliseconds([&](size_t t) { way->read(pieces[t], way->ahead); }, threads));
    }
  }
  for (Way& way : ways) {
    std::nth_element(way.ms.begin(), way.ms.begin() + rounds / 2, way.ms.end());
    std::printf("%7.3f  %s\n", way.ms[rounds / 2], way.name);
  }
}
