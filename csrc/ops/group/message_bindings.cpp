#include "ops/group/message_bindings.h"

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "core/symmetric/message_channel.h"

namespace axonn::ops {

namespace py = pybind11;

namespace {

// Copies a CPU tensor into the next message. This runs in a thread next to the computation, where
// ATen's own copy would start OpenMP threads of its own.
void send(comm::MessageSender& sender, const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const auto whole = tensor.contiguous();
  std::byte* to = sender.begin(bytes);
  if (bytes > 0) std::memcpy(to, whole.const_data_ptr(), static_cast<size_t>(bytes));
  sender.post();
}

// Returns the bytes of the next message, in place: the memory goes back to the sender when no
// tensor uses it any more. Returns nothing after `seconds`, or when stopped.
std::optional<at::Tensor> receive(const std::shared_ptr<comm::MessageReceiver>& receiver,
                                  double seconds) {
  const auto message = receiver->receive(std::chrono::duration<double>(seconds));
  if (!message) return std::nullopt;
  return at::from_blob(
      message->data, {message->bytes},
      [receiver, message = *message](void*) { receiver->release(message); },
      at::TensorOptions().dtype(at::kByte));
}

}  // namespace

void bind_messages(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using comm::MessageReceiver;
  using comm::MessageSender;
  py::class_<MessageSender, std::shared_ptr<MessageSender>>(m, "MessageSender")
      .def(py::init<const std::string&, int64_t>(), py::kw_only(), py::arg("name"),
           py::arg("address_space"))
      .def_property_readonly("address", &MessageSender::address)
      .def_property_readonly("num_bytes", &MessageSender::num_bytes)
      .def("close_descriptor", &MessageSender::close_descriptor)
      .def("send", &send, NoGil(), py::arg("tensor"));
  py::class_<MessageReceiver, std::shared_ptr<MessageReceiver>>(m, "MessageReceiver")
      .def(py::init<const std::string&>(), py::kw_only(), py::arg("address"))
      .def("receive", &receive, NoGil(), py::kw_only(), py::arg("seconds"))
      .def("stop", &MessageReceiver::stop);
}

}  // namespace axonn::ops
