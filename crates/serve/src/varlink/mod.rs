//! The parts that all varlink services share: the interface `org.varlink.service`, limits of a connection, and a
//! client.

mod bounded;
mod client;
mod messages;

pub(crate) use bounded::Bounded;
pub(crate) use client::{CallError, Client, Patience};
pub(crate) use messages::{
    DescriptionReply, InfoReply, MethodCall, SERVICE_DESCRIPTION, WrongCall,
};
