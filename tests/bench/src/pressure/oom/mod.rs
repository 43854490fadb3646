//! OOM kills whose victim and limit are known, and what an agent reports of them.

mod case;
mod driver;
mod judge;
mod matrix;
mod reports;

pub(crate) use driver::Outcome;
pub(crate) use driver::measure;
