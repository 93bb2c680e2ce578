"""The Realtime protocol over WebSocket: conversations of text and pictures, answered in text or speech."""
