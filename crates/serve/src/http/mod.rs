//! Limits for clients of services that speak HTTP.

pub(crate) mod connection;
