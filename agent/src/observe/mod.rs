//! `keblet observe`: what happens on a node, beside any kubelet. Reads only.
//!
//! ```text
//!  collect ──Line──▶ state (what is known) ──▶ view (terminal) · metrics (scrape) · report (tables)
//!                └─▶ JSON lines ───replay───▶ the same
//! ```
//!
//! `record` defines the records. Every output is a function of `state`, which is a fold over records, so that recorded lines
//! are shown like a live node.

pub mod collect;
pub mod metrics;
pub mod record;
pub mod replay;
pub mod report;
pub mod state;
pub mod text;
pub mod view;
