//! Ports of probes and hooks. Pure.

use k8s_openapi::api::core::v1::ContainerPort;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// Why a port cannot be resolved. The texts are upstream's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PortError {
    /// Not between 1 and 65535.
    #[error("invalid port number: {0}")]
    Range(i64),
    /// Not the name of a port of the container.
    #[error("port {0:?} not found")]
    Name(String),
}

/// The number of a port: an integer, or the name of one of the container's ports. A number as text is a name, as upstream
/// since 1.37.
///
/// # Errors
/// The name is not known, or the number is no port.
pub fn resolve_port(port: &IntOrString, ports: &[ContainerPort]) -> Result<u16, PortError> {
    let number = match port {
        IntOrString::Int(number) => i64::from(*number),
        IntOrString::String(name) => {
            let named = ports.iter().find(|port| port.name.as_deref().is_some_and(|known| known == name));
            i64::from(named.ok_or_else(|| PortError::Name(name.clone()))?.container_port)
        }
    };
    u16::try_from(number).ok().filter(|port| *port > 0).ok_or(PortError::Range(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_or_names_of_the_container() {
        let named = ContainerPort { name: Some("found".into()), container_port: 93, ..ContainerPort::default() };
        let ports = [ContainerPort { container_port: 80, ..ContainerPort::default() }, named];
        let text = |text: &str| IntOrString::String(text.into());
        for (port, expected) in [
            (text("found"), Ok(93)),
            (text("118"), Err(PortError::Name("118".into()))),
            (IntOrString::Int(65535), Ok(65535)),
            (text(""), Err(PortError::Name(String::new()))),
            (text("none"), Err(PortError::Name("none".into()))),
            (IntOrString::Int(66666), Err(PortError::Range(66666))),
            (IntOrString::Int(-1), Err(PortError::Range(-1))),
        ] {
            assert_eq!(resolve_port(&port, &ports), expected, "{port:?}");
        }
        assert_eq!(PortError::Range(-1).to_string(), "invalid port number: -1");
        assert_eq!(PortError::Name("web".into()).to_string(), "port \"web\" not found");
    }
}
