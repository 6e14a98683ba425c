#pragma once
// Index types, one for each kind of item: an index of a layer is no index of a subgroup, and no int. Ranges of them,
// and a vector that is indexed by one. They cost nothing at run time.
#include <compare>
#include <cstddef>
#include <utility>
#include <vector>

namespace tandem {

/// Index of an `Item` in a row of them, counted from 0, or none. Conversions are explicit, both ways, and there is none
/// between kinds. `Item` is only a name here: it may be incomplete.
template <class Item, class Number = int>
class Index {
 public:
  /// None.
  constexpr Index() = default;
  /// Below 0: none.
  constexpr explicit Index(Number number) noexcept : number_(number) {}
  /// Index of a position in an array.
  static constexpr Index at(std::size_t position) noexcept { return Index(static_cast<Number>(position)); }

  constexpr bool none() const noexcept { return number_ < 0; }
  constexpr Number number() const noexcept { return number_; }
  /// Position in an array. The index must not be none.
  constexpr std::size_t position() const noexcept { return static_cast<std::size_t>(number_); }

  constexpr Index& operator++() noexcept { return *this += 1; }
  constexpr Index& operator--() noexcept { return *this += -1; }
  constexpr Index operator++(int) noexcept { return Index(number_++); }
  constexpr Index& operator+=(Number steps) noexcept {
    number_ += steps;
    return *this;
  }
  friend constexpr Index operator+(Index index, Number steps) noexcept { return index += steps; }
  friend constexpr Index operator-(Index index, Number steps) noexcept { return index += -steps; }
  /// Steps from the second to the first.
  friend constexpr Number operator-(Index a, Index b) noexcept { return a.number_ - b.number_; }
  friend constexpr auto operator<=>(Index, Index) = default;

 private:
  Number number_ = -1;
};

/// Indices [first, end), for a loop over them. Empty by default.
template <class I>
struct IndexRange {
  class Iterator {
   public:
    constexpr explicit Iterator(I index) noexcept : index_(index) {}
    constexpr I operator*() const noexcept { return index_; }
    constexpr Iterator& operator++() noexcept {
      ++index_;
      return *this;
    }
    friend constexpr bool operator==(Iterator, Iterator) = default;

   private:
    I index_;
  };

  I first = I(0);
  I past = I(0);  ///< the index behind the last

  constexpr bool empty() const noexcept { return first == past; }
  constexpr Iterator begin() const noexcept { return Iterator(first); }
  constexpr Iterator end() const noexcept { return Iterator(past); }
};

/// The first `count` indices.
template <class I>
constexpr IndexRange<I> indices(std::size_t count) noexcept {
  return {I(0), I::at(count)};
}

/// A vector whose items are found by an index of one kind alone.
template <class I, class T>
class IndexedVector {
 public:
  IndexedVector() = default;
  explicit IndexedVector(std::size_t count) : items_(count) {}
  IndexedVector(std::size_t count, const T& value) : items_(count, value) {}

  /// The index must be one of `indices()`; it is not checked.
  decltype(auto) operator[](I index) { return items_[index.position()]; }
  decltype(auto) operator[](I index) const { return items_[index.position()]; }

  std::size_t size() const noexcept { return items_.size(); }
  bool empty() const noexcept { return items_.empty(); }
  IndexRange<I> indices() const noexcept { return tandem::indices<I>(size()); }
  auto begin() noexcept { return items_.begin(); }
  auto end() noexcept { return items_.end(); }
  auto begin() const noexcept { return items_.begin(); }
  auto end() const noexcept { return items_.end(); }

  void resize(std::size_t count) { items_.resize(count); }
  void assign(std::size_t count, const T& value) { items_.assign(count, value); }
  void push_back(T item) { items_.push_back(std::move(item)); }

 private:
  std::vector<T> items_;
};

}  // namespace tandem
