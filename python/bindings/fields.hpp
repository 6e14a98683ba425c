#pragma once
// Plain structs of the C++ interface as Python classes: a line for each field, from which property, keyword, default,
// type hint and repr are made.
#include <nanobind/nanobind.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/bindings/text_values.hpp"

namespace tandem::python {

/// One field of a struct `T` as Python sees it.
template <class T>
struct Field {
  std::string name;
  std::string gives;     ///< type hint of what is read
  std::string accepts;   ///< type hint of what may be assigned
  std::string fallback;  ///< its default, as repr has it
  std::function<void(T&, nb::handle)> set;
  std::function<nb::object(const T&)> get;
};

/// Fields of `T`, in the order of their declaration.
template <class T>
std::vector<Field<T>>& fields_of() {
  static std::vector<Field<T>> fields;
  return fields;
}

/// Sets the fields that keywords name. Throws TypeError for a name that is no field.
template <class T>
void assign(T& value, const nb::kwargs& keywords, std::string_view what) {
  for (const auto& [key, given] : keywords) {
    const auto name = nb::cast<std::string>(key);
    bool found = false;
    for (const Field<T>& field : fields_of<T>()) {
      if (field.name != name) continue;
      field.set(value, given);
      found = true;
    }
    if (!found) throw nb::type_error((std::string(what) + " has no field '" + name + "'").c_str());
  }
}

template <class T>
T from_keywords(const nb::kwargs& keywords, std::string_view what) {
  T value;
  assign(value, keywords, what);
  return value;
}

/// "name: type = default, ..." of all fields: keywords of a function that takes them.
template <class T>
std::string keywords_text() {
  std::string text;
  for (const Field<T>& field : fields_of<T>()) {
    const bool is_object = field.fallback.find('(') != std::string::npos;
    text += ", " + field.name + ": " + field.accepts + " = " + (is_object ? "..." : field.fallback);
  }
  return text;
}

/// Makes a Python class of `T` with keywords for all fields. Call `done` last.
template <class T>
class Fields {
 public:
  Fields(nb::handle scope, const char* name, const char* doc) : class_(scope, name, doc), name_(name) {}

  /// A field whose values nanobind converts, of the Python type `hint`.
  template <class M>
  Fields& value(const char* name, M T::*member, const char* hint, const char* doc) {
    return add(
        name, hint, hint, doc,
        [member, name = std::string(name), hint = std::string(hint)](T& t, nb::handle given) {
          if (!nb::try_cast(given, t.*member)) throw nb::type_error((name + ": " + hint + " expected").c_str());
        },
        [member](const T& t) { return nb::cast(t.*member); });
  }
  /// A number of bytes.
  Fields& bytes(const char* name, std::size_t T::*member, const char* doc) {
    return add(
        name, "int", "int | str", doc,
        [member, name = std::string(name)](T& t, nb::handle given) { t.*member = bytes_of(given, name); },
        [member](const T& t) { return nb::cast(t.*member); });
  }
  Fields& bytes(const char* name, std::optional<std::size_t> T::*member, const char* doc) {
    return add(
        name, "int | None", "int | str | None", doc,
        [member, name = std::string(name)](T& t, nb::handle given) {
          if (given.is_none()) {
            t.*member = std::nullopt;
          } else {
            t.*member = bytes_of(given, name);
          }
        },
        [member](const T& t) { return nb::cast(t.*member); });
  }
  /// A field written as text, which `read` and `print` convert.
  template <class M, class Read, class Print>
  Fields& text(const char* name, M T::*member, Read read, Print print, const char* doc) {
    return add(
        name, "str", "str", doc,
        [member, read, name = std::string(name)](T& t, nb::handle given) {
          std::string text;
          if (!nb::try_cast(given, text)) throw nb::type_error((name + ": str expected").c_str());
          t.*member = read(text);
        },
        [member, print](const T& t) { return nb::cast(std::string(print(t.*member))); });
  }

  nb::class_<T> done() {
    const std::string name = name_;
    class_.def(
        "__init__", [name](T* self, const nb::kwargs& keywords) { new (self) T(from_keywords<T>(keywords, name)); },
        nb::sig(("def __init__(self, *" + keywords_text<T>() + ") -> None").c_str()));
    class_.def("__repr__", [name](const T& self) {
      std::string text;
      for (const Field<T>& field : fields_of<T>()) {
        const std::string shown = nb::cast<std::string>(nb::repr(field.get(self)));
        if (shown != field.fallback) text += (text.empty() ? "" : ", ") + field.name + "=" + shown;
      }
      return name + "(" + text + ")";
    });
    class_.def(
        "replace",
        [name](const T& self, const nb::kwargs& keywords) {
          T copy = self;
          assign(copy, keywords, name);
          return copy;
        },
        nb::sig(("def replace(self, **changes: object) -> " + name).c_str()), "A copy with some fields changed.");
    return class_;
  }

 private:
  template <class Set, class Get>
  Fields& add(const char* name, const std::string& gives, const std::string& accepts, const char* doc, Set set,
              Get get) {
    const std::string fallback = nb::cast<std::string>(nb::repr(get(T{})));
    fields_of<T>().push_back({name, gives, accepts, fallback, set, get});
    const std::string getter = std::string("def ") + name + "(self, /) -> " + gives;
    const std::string setter = std::string("def ") + name + "(self, value: " + accepts + ", /) -> None";
    class_.def_prop_rw(
        name, get, [set](T& t, nb::object given) { set(t, given); }, nb::for_getter(nb::sig(getter.c_str())),
        nb::for_setter(nb::sig(setter.c_str())), nb::for_setter(nb::arg("value").none()), doc);
    return *this;
  }

  nb::class_<T> class_;
  std::string name_;
};

/// Makes a Python class of a struct that tandem fills in: fields that are read, and a repr. Call `done` last.
template <class T>
class Facts {
 public:
  Facts(nb::handle scope, const char* name, const char* doc) : class_(scope, name, doc), name_(name) {}

  template <class M>
  Facts& fact(const char* name, M T::*member, const char* doc) {
    class_.def_ro(name, member, doc);
    names_.emplace_back(name);
    return *this;
  }
  /// A value that `get` makes, of the Python type `hint`.
  template <class Get>
  Facts& derived(const char* name, Get get, const char* doc, const std::string& hint = "str") {
    class_.def_prop_ro(name, get,
                       nb::for_getter(nb::sig(("def " + std::string(name) + "(self, /) -> " + hint).c_str())), doc);
    names_.emplace_back(name);
    return *this;
  }
  nb::class_<T> done() {
    class_.def("__repr__", [name = name_, names = names_](nb::handle self) {
      std::string text;
      for (const std::string& field : names) {
        text += (text.empty() ? "" : ", ") + field + "=" + nb::cast<std::string>(nb::repr(self.attr(field.c_str())));
      }
      return name + "(" + text + ")";
    });
    return class_;
  }

 private:
  nb::class_<T> class_;
  std::string name_;
  std::vector<std::string> names_;
};

}  // namespace tandem::python
