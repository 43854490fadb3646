//! The main port: HTTPS, for clients that are known and allowed to ask.
//!
//! Owns transport security, authentication and authorization. What is answered behind the door is in the other files of
//! this room and in the routers other rooms hand over ([`super::Mounted`]).

mod user;

pub use user::User;
