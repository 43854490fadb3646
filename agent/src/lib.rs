//! The kubelet of events.
