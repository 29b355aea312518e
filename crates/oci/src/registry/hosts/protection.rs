//! How connections to a registry are protected.

/// Protection of the connections to a registry itself. For its mirrors, `hosts.toml` decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protection {
    /// HTTPS with a valid certificate, or HTTP on a loopback address without TLS settings, unless `hosts.toml` has
    /// another choice.
    #[default]
    Usual,
    /// HTTPS with a valid certificate, also on loopback addresses and whatever `hosts.toml` has.
    Verified,
    /// HTTPS with any certificate, or HTTP if the registry responds only to HTTP.
    Unverified,
    /// HTTP.
    None,
}
