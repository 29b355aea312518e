//! Calls and replies of the interface `org.varlink.service`.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zlink::varlink_service::Error;

/// Name of varlink's standard interface.
const SERVICE: &str = "org.varlink.service";

/// Description of varlink's standard interface in varlink's language.
pub(crate) const SERVICE_DESCRIPTION: &str = include_str!("org.varlink.service.varlink");

/// A method call whose parameters are not parsed yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MethodCall {
    pub(crate) method: String,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub(crate) parameters: Value,
}

impl MethodCall {
    /// Returns the interface that a `GetInterfaceDescription` asks for, which must be `own` or varlink's standard
    /// one.
    pub(crate) fn interface(&self, own: &str) -> Result<String, WrongCall> {
        let interface = self.parameters.get("interface").and_then(Value::as_str);
        let interface = interface.ok_or_else(|| WrongCall::Parameter("interface".to_owned()))?;
        match interface {
            SERVICE => Ok(interface.to_owned()),
            _ if interface == own => Ok(interface.to_owned()),
            _ => Err(WrongCall::Interface(interface.to_owned())),
        }
    }
}

/// Why a call is invalid, as one of varlink's standard errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WrongCall {
    Method(String),
    Interface(String),
    Parameter(String),
}

impl WrongCall {
    pub(crate) fn error(self) -> Error<'static> {
        match self {
            Self::Method(method) => Error::MethodNotFound { method: method.into() },
            Self::Interface(interface) => Error::InterfaceNotFound { interface: interface.into() },
            Self::Parameter(parameter) => Error::InvalidParameter { parameter: parameter.into() },
        }
    }
}

/// Source: varlink's `org.varlink.service`, `GetInfo`.
#[derive(Debug, Serialize)]
pub(crate) struct InfoReply {
    vendor: &'static str,
    product: &'static str,
    version: String,
    url: &'static str,
    interfaces: [&'static str; 2],
}

impl InfoReply {
    pub(crate) fn new(product: &'static str, version: &str, interface: &'static str) -> Self {
        let interfaces = [SERVICE, interface];
        Self { vendor: "Quire", product, version: version.to_owned(), url: "", interfaces }
    }
}

/// Source: varlink's `org.varlink.service`, `GetInterfaceDescription`.
#[derive(Debug, Serialize)]
pub(crate) struct DescriptionReply {
    pub(crate) description: &'static str,
}
