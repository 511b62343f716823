/* The nine symbols that the Python bindings of TensorRT 10, 11 and RTX link to. Built under the names of TensorRT's own
   libraries, this lets the real bindings import on any machine, to be asked which names they have. Nothing may be
   called: every function answers null. */

#define SYMBOL(name) \
    void *name(void) { return 0; }

SYMBOL(createInferBuilder_INTERNAL)
SYMBOL(createInferRefitter_INTERNAL)
SYMBOL(createInferRuntime_INTERNAL)
SYMBOL(createNvOnnxParser_INTERNAL)
SYMBOL(createNvOnnxParserRefitter_INTERNAL)
SYMBOL(getBuilderPluginRegistry)
SYMBOL(getNvOnnxParserVersion)
SYMBOL(getPluginRegistry)
SYMBOL(initLibNvInferPlugins)
